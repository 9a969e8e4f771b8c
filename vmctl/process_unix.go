//go:build unix && !linux

package vmctl

import (
	"context"
	"fmt"
	"os/exec"
	"syscall"
)

// runOwned runs cmd in a process group of its own. This system has no way to tie
// its life to ours: when the shim is killed, QEMU stays and is found by its lock.
func runOwned(cmd *exec.Cmd, started func()) error {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	started()
	return cmd.Wait()
}

// detach makes cmd outlive this process and its terminal.
func detach(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} }

// killHolders cannot find out here who holds a lock.
func killHolders(_ context.Context, path string) error {
	return fmt.Errorf("find who holds %s: %w", path, ErrUnsupported)
}
