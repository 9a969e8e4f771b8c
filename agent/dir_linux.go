package agent

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"helix.local/helix/agent/ports"
	"helix.local/helix/agent/process"
	"helix.local/helix/agent/session"
	"helix.local/helix/agent/wire"
)

// dirGrace is how long a folder's programs have between SIGTERM and SIGKILL.
const dirGrace = 2 * time.Second

// DirConfig is what RunDir needs to know.
type DirConfig struct {
	Boot    io.Reader // one line of JSON, a wire.Boot
	Link    *os.File  // one end of a socket pair with the gateway
	Env     []string  // where the programs' environment starts
	Version string
	Log     *slog.Logger // may be nil
}

// RunDir serves a folder on the gateway's machine until its link ends, ctx is
// done, the gateway process is gone, or the gateway asks for it. Then it ends
// every process that was started in the workspace and returns. It changes the
// whole process: orphaned descendants become its children.
func RunDir(ctx context.Context, cfg DirConfig) error {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	syscall.CloseOnExec(int(cfg.Link.Fd())) // or programs would hold the link open
	conn, err := net.FileConn(cfg.Link)
	if err != nil {
		return fmt.Errorf("open the link: %w", err)
	}
	defer func() { _ = conn.Close() }() // ended by the session
	if err := cfg.Link.Close(); err != nil {
		return fmt.Errorf("open the link: %w", err)
	}
	line, err := bufio.NewReaderSize(cfg.Boot, wire.MaxFrame).ReadSlice('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("read boot parameters: %w", err)
	}
	boot, err := ParseBoot(line)
	if err != nil {
		return err
	}
	if boot.Dir == "" {
		return errors.New("check boot parameters: dir: missing")
	}
	if err := process.Subreaper(); err != nil {
		return err //nolint:wrapcheck // says what
	}
	ctx, stop := untilParentEnds(ctx)
	defer stop()
	return errors.Join(serveDir(ctx, cfg, boot, conn, stop), endDescendants(ctx))
}

// untilParentEnds is done when the gateway's process is gone. The kernel sends
// the signal also when only the thread that started us ends, hence the look.
func untilParentEnds(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	parent := os.Getppid()
	died := make(chan os.Signal, 1)
	signal.Notify(died, unix.SIGUSR2)
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-ctx.Done():
				return
			case <-died:
				if os.Getppid() != parent {
					cancel()
				}
			}
		}
	}()
	// Without it the end of the link still tells.
	_ = unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGUSR2), 0, 0, 0)
	return ctx, func() {
		cancel()
		<-stopped
		signal.Stop(died)
	}
}

func serveDir(ctx context.Context, cfg DirConfig, boot wire.Boot, conn net.Conn, stop context.CancelFunc) error {
	program, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find the agent's program: %w", err)
	}
	account, err := ownAccount(boot.Dir)
	if err != nil {
		return err
	}
	shutdown := make(chan struct{}, 1)
	prefer, _ := netip.ParseAddr(boot.Address) // checked by ParseBoot; "" is none
	reaper := process.NewReaper()
	t, err := newTarget(settings{
		boot: boot, version: cfg.Version, log: cfg.Log, reaper: reaper, program: program, owner: account,
		accounts: func(string) (session.Account, error) { return account, nil },
		env: append(inherited(cfg.Env),
			"HELIX_WORKSPACE="+boot.Workspace, "HELIX_ADDR="+boot.Address, "HELIX_TARGET="+boot.Target),
		watch:  ports.Config{Processes: family, Prefer: prefer, Log: cfg.Log},
		checks: []check{{wire.CheckWorkspace, func() error { return writable(boot.Dir) }}},
		shutdown: func() {
			select {
			case shutdown <- struct{}{}:
			default: // asked before
			}
		},
	})
	if err != nil {
		return err
	}
	k, err := newKeeper(boot, cfg.Version, t.handle, cfg.Log)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var work errgroup.Group
	work.Go(func() error { return reaper.Run(ctx) })
	work.Go(func() error { return t.serveAPI(ctx) })
	work.Go(func() error {
		select {
		case <-shutdown:
			// The programs first: the answer to the request leaves meanwhile.
			err := endDescendants(ctx)
			cancel()
			return err
		case <-ctx.Done():
			return nil
		}
	})
	established, linkErr := k.run(ctx, conn, wire.LinkUnix)
	if established {
		cfg.Log.InfoContext(ctx, "link ended", "err", linkErr)
		linkErr = nil // the ordinary end
	}
	err = endDescendants(ctx)
	cancel()
	stopped := t.ssh.Close(dirGrace)
	return errors.Join(linkErr, err, stopped, work.Wait())
}

// inherited leaves out what speaks of the gateway's own start: its terminal,
// its service manager, the SSH connection that somebody started it over.
func inherited(env []string) []string {
	return slices.DeleteFunc(slices.Clone(env), func(pair string) bool {
		name, _, _ := strings.Cut(pair, "=")
		switch name {
		case "TERM", "NOTIFY_SOCKET", "INVOCATION_ID", "JOURNAL_STREAM", "MANAGERPID", "OLDPWD", "PWD", "SHLVL", "_":
			return true
		}
		for _, prefix := range []string{"SSH_", "HELIX_", "LISTEN_", "WATCHDOG_", "SYSTEMD_"} {
			if strings.HasPrefix(name, prefix) {
				return true
			}
		}
		return false
	})
}

// family is this process, for what ssh -R listens on, and its descendants.
func family() ([]int, error) {
	pids, err := process.Descendants(os.Getpid())
	return append(pids, os.Getpid()), err //nolint:wrapcheck // says what
}

func endDescendants(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*dirGrace)
	defer cancel()
	return process.EndAll(ctx, func() ([]int, error) { return process.Descendants(os.Getpid()) }, dirGrace) //nolint:wrapcheck // says what
}

// ownAccount is the user this process runs as. A user that has no entry still
// gets a shell.
func ownAccount(dir string) (session.Account, error) {
	uid := os.Geteuid()
	a, err := session.LookupID("/etc", uint32(uid)) //nolint:gosec // never negative on Linux
	if errors.Is(err, session.ErrNoAccount) || errors.Is(err, os.ErrNotExist) {
		return session.Account{
			Name: fmt.Sprint(uid), UID: uint32(uid), GID: uint32(os.Getegid()), //nolint:gosec // as above
			Home: dir, Shell: "/bin/sh", Own: true,
		}, nil
	}
	if err != nil {
		return a, err //nolint:wrapcheck // says what
	}
	if unix.Access(a.Shell, unix.X_OK) != nil || filepath.Base(a.Shell) == "nologin" || filepath.Base(a.Shell) == "false" {
		a.Shell = "/bin/sh" // a service user runs the gateway
	}
	a.Own = true
	return a, nil
}

// writable makes and removes a file in dir.
func writable(dir string) error {
	f, err := os.CreateTemp(dir, ".helix-check-")
	if err != nil {
		return err //nolint:wrapcheck // names the path
	}
	return errors.Join(f.Close(), os.Remove(f.Name()))
}
