package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Run reaps orphans until ctx is done.
func (r *Reaper) Run(ctx context.Context) error {
	died := make(chan os.Signal, 1)
	signal.Notify(died, unix.SIGCHLD)
	defer signal.Stop(died)
	for {
		if err := r.reapOrphans(ctx); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-died:
		}
	}
}

// reapOrphans looks at one dead child after the other without reaping it. An
// owned one is about to be reaped by its owner, so it waits for that.
func (r *Reaper) reapOrphans(ctx context.Context) error {
	for {
		pid, err := peek(unix.P_ALL, 0, unix.WNOHANG)
		if errors.Is(err, unix.ECHILD) || err == nil && pid == 0 {
			return nil
		}
		if err != nil {
			return fmt.Errorf("look for dead children: %w", err)
		}
		if done, owned := r.waiter(pid); owned {
			select {
			case <-done:
				continue
			case <-ctx.Done():
				return nil
			}
		}
		if _, err := unix.Wait4(pid, nil, unix.WNOHANG, nil); err != nil && !errors.Is(err, unix.ECHILD) && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("reap %d: %w", pid, err)
		}
	}
}

// childInfo is siginfo_t as waitid(2) fills it on the 64-bit ABIs.
type childInfo struct {
	signo, errno, code, _ int32
	pid                   int32
	_                     [108]byte
}

// peek reports a dead child without reaping it; 0 means there is none now.
func peek(kind, id, flags int) (int, error) {
	var info childInfo
	for {
		err := unix.Waitid(kind, id, (*unix.Siginfo)(unsafe.Pointer(&info)), unix.WEXITED|unix.WNOWAIT|flags, nil)
		if !errors.Is(err, unix.EINTR) {
			return int(info.pid), err //nolint:wrapcheck // both callers branch on the errno
		}
	}
}

// awaitExit returns when pid is dead and can be reaped without blocking.
func awaitExit(pid int) {
	_, _ = peek(unix.P_PID, pid, 0) // an error means it is gone already; Wait will say
}

// SignalGroup sends sig to the process group that the child leads. It does
// nothing once the child was reaped.
func (c *Child) SignalGroup(sig syscall.Signal) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.reaped {
		return nil
	}
	if err := unix.Kill(-c.PID(), sig); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("signal process group %d: %w", c.PID(), err)
	}
	return nil
}
