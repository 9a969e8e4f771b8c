//go:build !linux

package process

import (
	"context"
	"errors"
	"fmt"
	"syscall"
)

// Run fails: adopting orphans is a feature of Linux.
func (r *Reaper) Run(context.Context) error {
	return fmt.Errorf("reap orphans: %w", errors.ErrUnsupported)
}

func awaitExit(int) {}

// SignalGroup ends the child for SIGKILL and SIGTERM, the only signals every
// system can express.
func (c *Child) SignalGroup(sig syscall.Signal) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.reaped {
		return nil
	}
	if sig != syscall.SIGKILL && sig != syscall.SIGTERM {
		return fmt.Errorf("signal process %d with %v: %w", c.PID(), sig, errors.ErrUnsupported)
	}
	if err := c.cmd.Process.Kill(); err != nil {
		return fmt.Errorf("end process %d: %w", c.PID(), err)
	}
	return nil
}
