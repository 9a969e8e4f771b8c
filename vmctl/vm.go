package vmctl

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"path/filepath"
	"sync"
	"time"
)

// VM is a machine with a living shim, found by Start or Adopt. It holds nothing
// open between calls and may be used concurrently.
type VM struct {
	plan   Plan
	client *client
	reaped sync.WaitGroup // the shim, when it is a child of this process
}

// Plan is the plan the machine was started with.
func (v *VM) Plan() Plan { return v.plan }

// Adopt finds the machine that runs in runDir. It fails with ErrNotRunning when
// there is none, and with ErrOtherMachine when its UUID or generation differ.
// While somebody holds the machine but its shim does not answer, Adopt keeps
// asking until ctx ends; Kill is what helps then.
func Adopt(ctx context.Context, runDir, uuid string, generation uint64) (*VM, error) {
	p, err := ReadPlan(filepath.Join(runDir, "plan.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("adopt %s: %w", runDir, ErrNotRunning)
	}
	if err != nil {
		return nil, fmt.Errorf("adopt %s: %w", runDir, err)
	}
	retry := time.NewTicker(20 * time.Millisecond)
	defer retry.Stop()
	for {
		v := &VM{plan: p, client: newClient(p.Sockets.Shim)}
		st, err := v.Status(ctx)
		if err == nil {
			if st.UUID != uuid || st.Generation != generation {
				return nil, fmt.Errorf("adopt %s: %w: %s, generation %d", runDir, ErrOtherMachine, st.UUID, st.Generation)
			}
			if st.Exit != nil {
				return nil, fmt.Errorf("adopt %s: %w: it has just ended", runDir, ErrNotRunning)
			}
			return v, nil
		}
		lockErr := held(p.Files.Lock)
		if lockErr == nil { // nobody is there
			return nil, fmt.Errorf("adopt %s: %w", runDir, ErrNotRunning)
		}
		if !errors.Is(lockErr, ErrRunning) {
			return nil, fmt.Errorf("adopt %s: %w", runDir, lockErr)
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("adopt %s: the shim does not answer: %w", runDir, errors.Join(context.Cause(ctx), err))
		case <-retry.C:
		}
	}
}

// Status asks the shim.
func (v *VM) Status(ctx context.Context) (Status, error) {
	var st Status
	if err := v.client.get(ctx, "/status", &st); err != nil {
		return st, fmt.Errorf("status of %s: %w", v.plan.Name, err)
	}
	return st, nil
}

// Network reads the network back from QEMU and the shim.
func (v *VM) Network(ctx context.Context) (NetworkStatus, error) {
	var st NetworkStatus
	if err := v.client.get(ctx, "/network", &st); err != nil {
		return st, fmt.Errorf("network of %s: %w", v.plan.Name, err)
	}
	return st, nil
}

// DialSerial opens the byte channel to the guest's control port. It exists once:
// a second caller waits until the first has closed. It may hold bytes that an
// earlier user has left.
func (v *VM) DialSerial(ctx context.Context) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", v.plan.Sockets.Serial)
	if err != nil {
		return nil, fmt.Errorf("control port of %s: %w", v.plan.Name, err)
	}
	return conn, nil
}

// Watch calls f with the status now and at each change until f returns false, the
// machine ends (after the status with its Exit), or ctx ends. An error means that
// the shim was lost.
func (v *VM) Watch(ctx context.Context, f func(Status) bool) error {
	reply, err := v.client.do(ctx, "GET", "/watch", nil)
	if err != nil {
		return fmt.Errorf("watch %s: %w", v.plan.Name, err)
	}
	defer reply.Body.Close()
	in := json.NewDecoder(reply.Body)
	for {
		var st Status
		if err := in.Decode(&st); err != nil {
			if ctx.Err() != nil {
				err = context.Cause(ctx)
			}
			return fmt.Errorf("watch %s: %w", v.plan.Name, err)
		}
		if !f(st) || st.Exit != nil {
			return nil
		}
	}
}

// Wait returns how the machine ended, once it has and nothing of it is left
// running. When the shim vanished without a word the reason is ExitShimDied.
func (v *VM) Wait(ctx context.Context) (Exit, error) {
	var exit *Exit
	lost := v.Watch(ctx, func(st Status) bool {
		exit = st.Exit
		return true
	})
	if ctx.Err() != nil {
		return Exit{}, fmt.Errorf("wait for %s: %w", v.plan.Name, context.Cause(ctx))
	}
	if err := waitFree(ctx, v.plan.Files.Lock); err != nil {
		return Exit{}, fmt.Errorf("wait for %s: %w", v.plan.Name, err)
	}
	v.reaped.Wait()
	if exit != nil {
		return *exit, nil
	}
	if e, err := ReadExit(v.plan.RunDir); err == nil && e.UUID == v.plan.UUID && e.Generation == v.plan.Generation {
		return e, nil
	}
	return Exit{
		Version: PlanVersion, UUID: v.plan.UUID, Generation: v.plan.Generation,
		State: Failed, Reason: ExitShimDied, Detail: lost.Error(), Time: time.Now().UTC(),
	}, nil
}

// waitFree waits until nobody holds the lock of a run folder.
func waitFree(ctx context.Context, path string) error {
	retry := time.NewTicker(5 * time.Millisecond)
	defer retry.Stop()
	for {
		err := held(path)
		if err == nil {
			return nil
		}
		if !errors.Is(err, ErrRunning) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("still held: %w", context.Cause(ctx))
		case <-retry.C:
		}
	}
}

// StopConfig says how a machine is stopped. The times are those of its plan.
type StopConfig struct {
	AgentShutdown func(ctx context.Context) error  // asks the agent; nil: begin with the power button
	Progress      func(phase StopPhase, err error) // a phase begins (nil) or failed; nil: nobody listens
}

// Stop ends the machine, by ever harder phases, and tells which one did it. It
// returns once nothing of the machine is left running, and takes no error as the
// end: when all phases fail, it kills.
func (v *VM) Stop(ctx context.Context, cfg StopConfig) (Exit, error) {
	tell := func(phase StopPhase, err error) {
		if cfg.Progress != nil {
			cfg.Progress(phase, err)
		}
	}
	for _, phase := range v.plan.Stop {
		name := StopPhase(phase.Name)
		if name == PhaseAgent && cfg.AgentShutdown == nil || name == PhaseACPI && !v.plan.ACPI || name == PhaseKill {
			continue
		}
		tell(name, nil)
		limit, cancel := context.WithTimeout(ctx, phase.Timeout)
		exit, err := v.tryStop(limit, name, cfg.AgentShutdown)
		cancel()
		if err == nil {
			return exit, nil
		}
		if ctx.Err() != nil {
			return Exit{}, fmt.Errorf("stop %s: %w", v.plan.Name, context.Cause(ctx))
		}
		tell(name, err)
	}
	tell(PhaseKill, nil)
	return v.Kill(ctx)
}

func (v *VM) tryStop(ctx context.Context, phase StopPhase, agent func(context.Context) error) (Exit, error) {
	if err := v.askStop(ctx, phase); err != nil {
		if exit, gone := v.gone(); gone {
			return exit, nil
		}
		return Exit{}, err
	}
	if phase == PhaseAgent {
		if err := agent(ctx); err != nil {
			if exit, gone := v.gone(); gone {
				return exit, nil
			}
			return Exit{}, err
		}
	}
	return v.Wait(ctx)
}

func (v *VM) askStop(ctx context.Context, phase StopPhase) error {
	body, err := json.Marshal(stopRequest{phase})
	if err != nil {
		return fmt.Errorf("encode stop: %w", err)
	}
	reply, err := v.client.do(ctx, "POST", "/stop", bytes.NewReader(body))
	if err != nil {
		return err
	}
	return reply.Body.Close()
}

// gone reports whether nothing of the machine is left, and its exit if known.
func (v *VM) gone() (Exit, bool) {
	if held(v.plan.Files.Lock) != nil {
		return Exit{}, false
	}
	v.reaped.Wait()
	exit, err := ReadExit(v.plan.RunDir)
	if err != nil || exit.Generation != v.plan.Generation {
		exit = Exit{Version: PlanVersion, UUID: v.plan.UUID, Generation: v.plan.Generation, State: Failed, Reason: ExitShimDied, Time: time.Now().UTC()}
	}
	return exit, true
}

// Kill ends the machine at once: by its shim, and if that does not answer in
// time, by ending the processes that hold its lock.
func (v *VM) Kill(ctx context.Context) (Exit, error) {
	limit, cancel := context.WithTimeout(ctx, limitOf(v.plan.Stop, string(PhaseKill)))
	exit, err := v.tryStop(limit, PhaseKill, nil)
	cancel()
	if err == nil {
		return exit, nil
	}
	if err := Kill(ctx, v.plan.RunDir); err != nil {
		return Exit{}, err
	}
	v.reaped.Wait()
	return Exit{
		Version: PlanVersion, UUID: v.plan.UUID, Generation: v.plan.Generation,
		State: Exited, Reason: ExitKilled, Phase: PhaseKill, Time: time.Now().UTC(),
	}, nil
}

// Kill ends whatever holds the machine of a run folder, also when its shim does
// not answer, and returns when all of it is gone. Only processes that hold the
// folder's lock are touched. Nothing running is no error.
func Kill(ctx context.Context, runDir string) error {
	if err := killHolders(ctx, filepath.Join(runDir, "shim.lock")); err != nil {
		return fmt.Errorf("kill machine in %s: %w", runDir, err)
	}
	// A process that is ending shows no files any more and may still have them open.
	if err := waitFree(ctx, filepath.Join(runDir, "shim.lock")); err != nil {
		return fmt.Errorf("kill machine in %s: %w", runDir, err)
	}
	if err := removeTransient(runDir); err != nil {
		return fmt.Errorf("kill machine in %s: %w", runDir, err)
	}
	return nil
}
