package vmctl

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"time"
)

// StartConfig is what Start needs besides the plan.
type StartConfig struct {
	Helix    string          // path of the program whose "vmshim PLAN" runs RunShim
	Boot     []byte          // wire.Boot as JSON, secret; handed to the guest by fw_cfg
	Progress func(StepEvent) // nil: nobody listens; called from one goroutine
	Log      *slog.Logger    // nil: discard
}

// Start carries out a plan and returns when QEMU runs the guest with the network
// that was planned; whether the guest is ready is for its agent to say. When a
// step fails the earlier ones are taken back: no process and no socket is left,
// only the disk and the logs. The error is then a *StepError. When ctx ends the
// start is taken back too; when this process is killed the shim goes on alone,
// and Adopt finds it.
func Start(ctx context.Context, p Plan, cfg StartConfig) (*VM, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	s := &starter{plan: p, cfg: cfg, log: cfg.Log.With("workspace", p.Name), vm: &VM{plan: p, client: newClient(p.Sockets.Shim)}}
	for _, step := range []struct {
		name Step
		run  func(context.Context) error
	}{{StepPrepare, s.prepare}, {StepDisk, s.disk}, {StepShim, s.spawn}, {StepQEMU, s.await}} {
		if err := s.step(ctx, step.name, step.run); err != nil {
			return nil, s.takeBack(ctx, err)
		}
	}
	return s.vm, nil
}

type starter struct {
	plan   Plan
	cfg    StartConfig
	log    *slog.Logger
	vm     *VM
	ours   bool          // the run folder was free: what is in it may be taken back
	shim   *exec.Cmd     // nil before it was spawned
	exited chan struct{} // closes when the shim has ended
}

func (s *starter) tell(step Step, done bool, took time.Duration) {
	s.log.Debug("start step", "step", step, "done", done, "took", took)
	if s.cfg.Progress != nil {
		s.cfg.Progress(StepEvent{Machine: s.plan.Name, Step: step, Done: done, Took: took})
	}
}

// step runs one step with its deadline. Await goes through several and tells of
// each by itself.
func (s *starter) step(ctx context.Context, name Step, run func(context.Context) error) error {
	if name == StepQEMU {
		return run(ctx)
	}
	begin := time.Now()
	s.tell(name, false, 0)
	limit := limitOf(s.plan.Steps, string(name))
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("not done after %v", limit))
	defer cancel()
	if err := run(ctx); err != nil {
		var known *StepError
		if errors.As(err, &known) {
			return err
		}
		if cause := context.Cause(ctx); cause != nil && !errors.Is(err, cause) {
			err = fmt.Errorf("%w: %w", cause, err)
		}
		return &StepError{Machine: s.plan.Name, Step: name, Err: err}
	}
	s.tell(name, true, time.Since(begin))
	return nil
}

func (s *starter) prepare(context.Context) error {
	if err := os.MkdirAll(s.plan.RunDir, 0o700); err != nil {
		return fmt.Errorf("make run folder: %w", err)
	}
	if err := os.Chmod(s.plan.RunDir, 0o700); err != nil {
		return fmt.Errorf("protect run folder: %w", err)
	}
	if _, err := os.Stat(s.plan.QEMU); err != nil {
		return &CureError{fmt.Errorf("QEMU: %w", err), "install QEMU, or tell where it is"}
	}
	lock, err := lockRun(s.plan.Files.Lock)
	if err != nil {
		return err
	}
	s.ours = true
	defer lock.Close()
	if err := removeTransient(s.plan.RunDir); err != nil {
		return fmt.Errorf("clear run folder: %w", err)
	}
	if err := os.Remove(s.plan.Files.Exit); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("clear run folder: %w", err)
	}
	if err := writeJSON(s.plan.Files.Plan, s.plan); err != nil {
		return err
	}
	return writePrivate(s.plan.Files.Boot, s.cfg.Boot)
}

func (s *starter) disk(ctx context.Context) error { return makeDisk(ctx, s.plan.Disk) }

// spawn starts the shim and waits for its first word.
func (s *starter) spawn(ctx context.Context) error {
	out, err := os.OpenFile(s.plan.Files.ShimLog, os.O_CREATE|os.O_WRONLY|os.O_TRUNC|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("open shim log: %w", err)
	}
	defer out.Close()
	cmd := exec.Command(s.cfg.Helix, "vmshim", s.plan.Files.Plan)
	cmd.Dir, cmd.Stdout, cmd.Stderr = s.plan.RunDir, out, out
	detach(cmd)
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("run %s: %w", s.cfg.Helix, err)
	}
	s.shim, s.exited = cmd, make(chan struct{})
	s.vm.reaped.Go(func() { // takes the exit status, or the shim would stay a zombie
		err := cmd.Wait()
		s.log.Debug("shim ended", "err", err)
		close(s.exited)
	})
	retry := time.NewTicker(3 * time.Millisecond)
	defer retry.Stop()
	for {
		st, err := s.vm.Status(ctx)
		if err == nil && st.UUID == s.plan.UUID && st.Generation == s.plan.Generation {
			return nil
		}
		select {
		case <-s.exited:
			return s.shimEnded()
		case <-ctx.Done():
			return fmt.Errorf("the shim does not answer: %w", context.Cause(ctx))
		case <-retry.C:
		}
	}
}

// shimEnded says why a shim is no more: by what it wrote down, else by its log.
func (s *starter) shimEnded() error {
	if e, err := ReadExit(s.plan.RunDir); err == nil {
		return exitError(s.plan.Name, e)
	}
	text, err := os.ReadFile(s.plan.Files.ShimLog)
	if err != nil {
		return fmt.Errorf("the shim ended at once: %w", err)
	}
	lines := lastLines(text)
	return &StepError{Machine: s.plan.Name, Step: StepShim, Err: errors.New(withLast("the shim ended at once", lines)), Lines: lines}
}

// exitError turns the shim's verdict on a failed start into the step's error.
func exitError(name string, e Exit) error {
	step := e.Step
	if step == "" {
		step = StepQEMU
	}
	detail := e.Detail
	if detail == "" {
		detail = string(e.Reason)
	}
	return &StepError{Machine: name, Step: step, Err: errors.New(detail), Lines: e.Lines}
}

// await follows the shim through its steps.
func (s *starter) await(ctx context.Context) error {
	total := limitOf(s.plan.Steps, string(StepQEMU)) + limitOf(s.plan.Steps, string(StepNetwork)) + time.Second
	ctx, cancel := context.WithTimeoutCause(ctx, total, fmt.Errorf("not done after %v", total))
	defer cancel()
	current, begin := StepQEMU, time.Now()
	s.tell(current, false, 0)
	var failed error
	running := false
	err := s.vm.Watch(ctx, func(st Status) bool {
		if st.Step != "" && st.Step != current {
			s.tell(current, true, time.Since(begin))
			current, begin = st.Step, time.Now()
			s.tell(current, false, 0)
		}
		if st.Exit != nil {
			failed = exitError(s.plan.Name, *st.Exit)
			return false
		}
		running = st.State == Running
		return !running
	})
	if running {
		s.tell(StepNetwork, true, time.Since(begin))
		return nil
	}
	if failed == nil {
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		failed = &StepError{Machine: s.plan.Name, Step: current, Err: err}
	}
	return failed
}

// takeBack undoes the steps that were done.
func (s *starter) takeBack(ctx context.Context, err error) error {
	if !s.ours {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*limitOf(s.plan.Stop, string(PhaseKill)))
	defer cancel()
	var undo error
	if s.shim != nil {
		undo = s.killShim(ctx)
	}
	undo = errors.Join(undo, removeTransient(s.plan.RunDir))
	if undo == nil {
		return err
	}
	var step *StepError
	if errors.As(err, &step) {
		return &StepError{Machine: step.Machine, Step: step.Step, Err: errors.Join(step.Err, undo), Lines: step.Lines, hint: step.Hint()}
	}
	return errors.Join(err, undo)
}

// killShim ends the shim of this start, gently if it listens, and with it QEMU.
// The shim is a child that has not been waited for, so its number is its own.
func (s *starter) killShim(ctx context.Context) error {
	gently, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if s.vm.askStop(gently, PhaseKill) == nil {
		select {
		case <-s.exited:
		case <-gently.Done():
		}
	}
	if err := s.shim.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill shim: %w", err)
	}
	s.vm.reaped.Wait()
	return Kill(ctx, s.plan.RunDir)
}
