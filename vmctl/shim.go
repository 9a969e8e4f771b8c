package vmctl

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"helix.local/helix/vmctl/guestnet"
)

// shimLogBytes bounds what one start writes to shim.log.
const shimLogBytes = 1 << 20

// ShimConfig is what RunShim may be given. The zero value is what the program
// uses.
type ShimConfig struct {
	Log     *slog.Logger                          // nil: text on standard error, capped
	Network func(guestnet.Config) guestnet.Config // last word on the network, for tests; nil: none
}

// RunShim is the whole life of a shim: it starts QEMU as the plan at planPath
// says, serves the plan's shim socket, and returns when QEMU has ended and the
// end is written down. It fails with ErrRunning when the machine already has a
// shim. The process must do nothing else: its umask and signals are taken over.
func RunShim(ctx context.Context, planPath string, cfg ShimConfig) error {
	privateFiles()
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.NewTextHandler(&cappedFile{w: os.Stderr, left: shimLogBytes}, nil))
	}
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGTERM, os.Interrupt)
	defer stop()
	p, err := ReadPlan(planPath)
	if err != nil {
		return err
	}
	lock, err := lockRun(p.Files.Lock)
	if err != nil {
		return fmt.Errorf("shim of %s: %w", p.Name, err)
	}
	// The lock is never given back here: the kernel does it when the process is gone,
	// and until then nobody may take the machine for ended.
	s := &shim{plan: p, cfg: cfg, log: cfg.Log.With("workspace", p.Name), lock: lock, changed: make(chan struct{})}
	s.status = Status{
		Version: PlanVersion, Name: p.Name, UUID: p.UUID, Generation: p.Generation, State: Starting, Step: StepQEMU,
		Accel: p.Accel, Machine: p.Machine, ShimPID: os.Getpid(), Started: time.Now().UTC(),
	}
	if err := s.serve(ctx); err != nil {
		s.log.Error("shim failed", "err", err)
		return fmt.Errorf("shim of %s: %w", p.Name, err)
	}
	return nil
}

// shim owns one QEMU process and everything attached to it.
type shim struct {
	plan Plan
	cfg  ShimConfig
	log  *slog.Logger
	lock *os.File

	console *console
	network *guestnet.Network

	mu      sync.Mutex // guards what follows
	status  Status
	qemu    *process // nil before QEMU runs
	monitor *monitor // nil before QEMU answers
	phase   StopPhase
	changed chan struct{} // closed and replaced at each change of status
}

// serve listens, runs the machine, and tells those who watch how it ended.
func (s *shim) serve(ctx context.Context) (err error) {
	boot, err := os.ReadFile(s.plan.Files.Boot) // a start without its secret must not happen
	if err != nil || len(boot) == 0 {
		return fmt.Errorf("boot secret is not there: %w", err)
	}
	for _, path := range []string{s.plan.Sockets.Shim, s.plan.Sockets.QMP, s.plan.Sockets.Serial, s.plan.Sockets.Net, s.plan.Sockets.Console} {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("remove old socket: %w", err)
		}
	}
	if s.console, err = openConsole(s.plan.Files.Console, s.plan.Console); err != nil {
		return err
	}
	defer s.console.Close()
	listener, err := net.Listen("unix", s.plan.Sockets.Shim)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	server := &http.Server{Handler: s.routes(), ReadHeaderTimeout: 5 * time.Second, ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug)}
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			s.log.Error("shim socket ended", "err", err)
		}
	})
	exit := s.run(ctx)
	if err := writeJSON(s.plan.Files.Exit, exit); err != nil {
		s.log.Error("exit not written", "err", err)
	}
	if err := removeTransient(s.plan.RunDir); err != nil {
		s.log.Error("run files not removed", "err", err)
	}
	s.change(func(st *Status) { st.State, st.Exit = exit.State, &exit })
	s.log.Info("machine ended", "state", exit.State, "reason", exit.Reason, "detail", exit.Detail)
	// Watchers get the last word; one that does not read is not waited for.
	grace, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	if err := server.Shutdown(grace); err != nil {
		err = server.Close()
		s.log.Warn("watchers were cut off", "err", err)
	}
	serving.Wait()
	return nil
}
