// Package process starts child processes and reaps what nobody else waits for.
//
// An agent adopts orphans: as PID 1 all of a guest's, as a subreaper those of
// its own descendants. They must be reaped without taking the exit status of a
// child that somebody waits for. A [Reaper] knows the latter and leaves them alone.
package process

import (
	"fmt"
	"os/exec"
	"sync"
)

// Reaper starts children and, while Run runs, reaps orphans. A nil *Reaper
// starts children too; it is for programs that adopt nobody.
type Reaper struct {
	mu    sync.Mutex // held across a start, so that no child is seen before it is known
	owned map[int]chan struct{}
}

// NewReaper returns a Reaper that owns no child yet.
func NewReaper() *Reaper {
	return &Reaper{owned: make(map[int]chan struct{})}
}

// Child is one started process. Its methods may be called concurrently, Wait
// only once.
type Child struct {
	cmd    *exec.Cmd
	reaper *Reaper

	mu     sync.Mutex // held across the reaping, so that no signal reaches a reused PID
	reaped bool
}

// Start starts cmd, whose standard streams must be files: Wait waits for the
// process alone, not for copying.
func (r *Reaper) Start(cmd *exec.Cmd) (*Child, error) {
	if r != nil {
		r.mu.Lock()
		defer r.mu.Unlock()
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", cmd.Path, err)
	}
	if r != nil {
		r.owned[cmd.Process.Pid] = make(chan struct{})
	}
	return &Child{cmd: cmd, reaper: r}, nil
}

// PID is the process's number.
func (c *Child) PID() int { return c.cmd.Process.Pid }

// Wait waits for the end of the process and reaps it. The error is that of
// exec.Cmd.Wait: nil for status 0, an *exec.ExitError for any other end.
func (c *Child) Wait() error {
	awaitExit(c.PID())
	c.mu.Lock()
	err := c.cmd.Wait()
	c.reaped = true
	c.mu.Unlock()
	if c.reaper != nil {
		c.reaper.release(c.PID())
	}
	return err //nolint:wrapcheck // the exec.ExitError is the contract
}

func (r *Reaper) release(pid int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if done, ok := r.owned[pid]; ok {
		close(done)
		delete(r.owned, pid)
	}
}

// waiter returns what is closed when the owner of pid has reaped it.
func (r *Reaper) waiter(pid int) (<-chan struct{}, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	done, ok := r.owned[pid]
	return done, ok
}
