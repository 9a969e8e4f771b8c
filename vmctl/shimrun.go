package vmctl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"helix.local/helix/vmctl/guestnet"
)

// process is a running QEMU.
type process struct {
	cmd   *exec.Cmd
	alive context.Context // ends with the process; its cause says how
	said  tail            // end of its output
}

// startProcess starts cmd; its goroutine ends with it.
func startProcess(cmd *exec.Cmd) (*process, error) {
	alive, end := context.WithCancelCause(context.Background())
	p := &process{cmd: cmd, alive: alive}
	cmd.Stdout, cmd.Stderr = &p.said, &p.said
	began := make(chan error, 1)
	go func() {
		err := runOwned(cmd, func() { began <- nil })
		if cmd.Process == nil {
			began <- err
		}
		if err == nil {
			err = errors.New("exit status 0")
		}
		end(err)
	}()
	if err := <-began; err != nil {
		return nil, fmt.Errorf("run %s: %w", cmd.Path, err)
	}
	return p, nil
}

// kill ends the process and its group. It is harmless when it has ended.
func (p *process) kill() {
	if p.alive.Err() == nil {
		_ = p.cmd.Process.Kill() // it may just have ended
	}
}

// tail keeps the end of what is written to it.
type tail struct {
	mu   sync.Mutex
	text []byte
}

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, b...)
	if over := len(t.text) - tailBytes; over > 0 {
		t.text = append([]byte(nil), t.text[over:]...)
	}
	return len(b), nil
}

func (t *tail) lines() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return lastLines(t.text)
}

// cables are the listeners QEMU connects to, each taken by the first to come.
type cables struct {
	net, console net.Listener
	wg           sync.WaitGroup
}

func (c *cables) close() {
	for _, l := range []net.Listener{c.net, c.console} {
		if l != nil {
			_ = l.Close() // may be closed already
		}
	}
}

// plugIn listens for QEMU's network card and console and serves what connects,
// once each: nobody can take the place of QEMU later.
func (s *shim) plugIn(ctx context.Context, c *cables) error {
	var err error
	if c.net, err = net.Listen("unix", s.plan.Sockets.Net); err != nil {
		return fmt.Errorf("listen for the network card: %w", err)
	}
	if c.console, err = net.Listen("unix", s.plan.Sockets.Console); err != nil {
		c.close()
		return fmt.Errorf("listen for the console: %w", err)
	}
	serve := func(l net.Listener, what string, f func(net.Conn) error) {
		conn, err := l.Accept()
		_ = l.Close() // one is enough
		if err != nil {
			return // closed before QEMU came
		}
		if err := f(conn); err != nil && ctx.Err() == nil {
			s.log.Warn(what+" ended", "err", err)
		}
	}
	c.wg.Go(func() {
		serve(c.net, "network", func(conn net.Conn) error { return s.network.Serve(ctx, conn) })
	})
	c.wg.Go(func() {
		serve(c.console, "console", func(conn net.Conn) error {
			stop := context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(time.Now().Add(time.Second)) })
			defer stop()
			_, err := io.Copy(s.console, conn)
			return errors.Join(err, conn.Close())
		})
	})
	return nil
}

// run starts the machine, waits for its end, and judges it.
func (s *shim) run(ctx context.Context) Exit {
	config := guestnet.Config{Policy: s.plan.Network.Policy, Link: s.plan.Sockets.Link, Log: s.log}
	if s.cfg.Network != nil {
		config = s.cfg.Network(config)
	}
	var err error
	if s.network, err = guestnet.New(config); err != nil {
		return s.verdict(err)
	}
	defer s.network.Close()
	plugged, unplug := context.WithCancel(context.Background())
	var c cables
	if err := s.plugIn(plugged, &c); err != nil {
		unplug()
		c.wg.Wait()
		return s.verdict(err)
	}
	cmd := exec.Command(s.plan.QEMU, s.plan.Args...)
	cmd.Dir = s.plan.RunDir
	cmd.ExtraFiles = []*os.File{s.lock} // it holds the lock too, see lockRun
	qemu, err := startProcess(cmd)
	if err == nil {
		s.mu.Lock()
		s.qemu = qemu
		s.mu.Unlock()
		s.change(func(st *Status) { st.QEMUPID = cmd.Process.Pid })
		if err = s.bringUp(ctx, qemu); err != nil {
			qemu.kill()
		}
		s.wait(ctx, qemu)
	}
	c.close()
	unplug()
	c.wg.Wait()
	s.mu.Lock()
	m := s.monitor
	s.mu.Unlock()
	if m != nil {
		m.drain()
	}
	return s.verdict(err)
}

// bringUp waits for QEMU's monitor, checks the network, and lets the guest run.
func (s *shim) bringUp(ctx context.Context, qemu *process) error {
	ctx, gone := context.WithCancelCause(ctx)
	defer gone(nil)
	stop := context.AfterFunc(qemu.alive, func() { gone(errors.New("QEMU ended during the start")) })
	defer stop()
	step := func(name Step) (context.Context, context.CancelFunc) {
		s.change(func(st *Status) { st.Step = name })
		limit := limitOf(s.plan.Steps, string(name))
		return context.WithTimeoutCause(ctx, limit, fmt.Errorf("not done after %v", limit))
	}
	first, cancel := step(StepQEMU)
	defer cancel()
	m, err := connectMonitor(first, s.plan.Sockets.QMP)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.monitor = m
	s.mu.Unlock()
	// QEMU has read the secret, and the file has no further use.
	if err := os.Remove(s.plan.Files.Boot); err != nil {
		return fmt.Errorf("remove boot secret: %w", err)
	}
	second, cancel := step(StepNetwork)
	defer cancel()
	if err := s.checkCards(second, m); err != nil {
		return err
	}
	if have := s.network.Status(); have.Policy != s.plan.Network.Policy {
		return fmt.Errorf("network read back: policy is %q, planned is %q", have.Policy, s.plan.Network.Policy)
	}
	if err := m.run(second, "cont", nil, nil); err != nil {
		return err
	}
	s.change(func(st *Status) { st.State, st.Step = Running, "" })
	s.log.Info("machine running", "accel", s.plan.Accel)
	return nil
}

// checkCards compares QEMU's network with the plan. QEMU connects its cable in
// the background, so a cable that is still loose is looked at again.
func (s *shim) checkCards(ctx context.Context, m *monitor) error {
	again := time.NewTicker(2 * time.Millisecond)
	defer again.Stop()
	for {
		cards, err := m.cards(ctx)
		if err != nil {
			return err
		}
		err = compareNetwork(s.plan.Network, s.plan.Sockets.Net, cards)
		if err == nil || len(cards) != 1 || cards[0].peerInfo != "" || cards[0].peerKind != "stream" {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-again.C:
		}
	}
}

// wait returns when QEMU has ended. When ctx ends, which is the shim's own
// SIGTERM, QEMU is told to end, and killed if it does not.
func (s *shim) wait(ctx context.Context, qemu *process) {
	select {
	case <-qemu.alive.Done():
		return
	case <-ctx.Done():
	}
	limit, cancel := context.WithTimeout(context.WithoutCancel(ctx), limitOf(s.plan.Stop, string(PhaseQuit)))
	defer cancel()
	if err := s.stop(limit, PhaseQuit); err != nil {
		s.log.Warn("quit not accepted", "err", err)
		qemu.kill()
	}
	select {
	case <-qemu.alive.Done():
	case <-limit.Done():
		qemu.kill()
		<-qemu.alive.Done()
	}
}

// stop begins one phase of the machine's end.
func (s *shim) stop(ctx context.Context, phase StopPhase) error {
	s.mu.Lock()
	m, qemu := s.monitor, s.qemu
	s.phase = phase
	s.mu.Unlock()
	s.change(func(st *Status) {
		if st.State == Running || st.State == Starting {
			st.State = Stopping
		}
	})
	switch phase {
	case PhaseAgent: // the caller asks the agent
		return nil
	case PhaseKill:
		if qemu != nil {
			qemu.kill()
		}
		return nil
	case PhaseACPI, PhaseQuit:
		if m == nil {
			return errors.New("QEMU's monitor does not answer yet")
		}
		command := map[StopPhase]string{PhaseACPI: "system_powerdown", PhaseQuit: "quit"}[phase]
		err := m.run(ctx, command, nil, nil)
		if err != nil && qemu.alive.Err() != nil {
			return nil // it ended before it could answer
		}
		return err
	}
	return fmt.Errorf("stop phase %q is not known", phase)
}

// verdict judges the end of the machine. startErr is why a start was given up.
func (s *shim) verdict(startErr error) Exit {
	s.mu.Lock()
	phase, step, m, qemu := s.phase, s.status.Step, s.monitor, s.qemu
	s.mu.Unlock()
	e := Exit{Version: PlanVersion, UUID: s.plan.UUID, Generation: s.plan.Generation, State: Exited, Phase: phase, Time: time.Now().UTC()}
	reason := ""
	if m != nil {
		reason = m.reason()
	}
	switch {
	case startErr != nil && phase == "":
		e.State, e.Reason, e.Step, e.Detail = Failed, ExitStart, step, startErr.Error()
		if qemu != nil {
			e.Lines = append(s.console.Lines(), qemu.said.lines()...)
			e.Detail = withLast(e.Detail, qemu.said.lines())
		}
	case phase == PhaseKill:
		e.Reason = ExitKilled
	case reason == "guest-shutdown":
		e.Reason = ExitGuestShutdown
	case reason == "guest-reset" || reason == "guest-panic":
		e.Reason = ExitGuestReset
		if phase == "" {
			e.State, e.Detail, e.Lines = Failed, "the guest reset itself", s.console.Lines()
			if why := s.console.panicked(); why != "" {
				e.Detail = "the guest's kernel gave up: " + why
			}
		}
	case phase == PhaseQuit:
		e.Reason = ExitQuit
	default:
		e.State, e.Reason = Failed, ExitCrash
		e.Lines = append(s.console.Lines(), qemu.said.lines()...)
		e.Detail = withLast(endOf(qemu), qemu.said.lines())
	}
	return e
}

func endOf(qemu *process) string {
	cause := context.Cause(qemu.alive)
	var exit *exec.ExitError
	if errors.As(cause, &exit) {
		if ws, ok := exit.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
			return "QEMU was ended by signal " + ws.Signal().String()
		}
	}
	return fmt.Sprintf("QEMU ended by itself: %v", cause)
}

// withLast adds the line in which a program usually says why it ends.
func withLast(text string, lines []string) string {
	if len(lines) == 0 {
		return text
	}
	return text + ": " + lines[len(lines)-1]
}
