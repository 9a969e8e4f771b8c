package vmctl

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// runOwned runs cmd so that it cannot outlive this process, not even when this
// process is killed. started is called once it runs. The kernel ties the death
// signal to the thread that forked, so that thread stays until the child ends.
func runOwned(cmd *exec.Cmd, started func()) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return err
	}
	started()
	return cmd.Wait()
}

// detach makes cmd outlive this process and its terminal.
func detach(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} }

// holders finds the processes that hold the lock on path. What the kernel shows
// for an open file names the locks held through that very file, so this is true
// for inherited locks too, and no process number is ever read from a file of ours.
func holders(path string) ([]int, error) {
	want, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("find lock holders: %w", err)
	}
	procs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, fmt.Errorf("find lock holders: %w", err)
	}
	var pids []int
	for _, dir := range procs {
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err == nil && pid != os.Getpid() && holdsLock(dir, want) {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

func holdsLock(dir string, want os.FileInfo) bool {
	fds, err := os.ReadDir(dir + "/fd")
	if err != nil {
		return false // ended, or another user's
	}
	for _, fd := range fds {
		is, err := os.Stat(dir + "/fd/" + fd.Name())
		if err != nil || !os.SameFile(is, want) {
			continue
		}
		info, err := os.ReadFile(dir + "/fdinfo/" + fd.Name())
		if err == nil && strings.Contains(string(info), "FLOCK") {
			return true
		}
	}
	return false
}

// killHolders ends every process that holds the lock on path and waits until the
// lock is free. Each is verified again after it has been pinned by a pidfd, so
// that a number which was given to somebody else meanwhile is not harmed.
func killHolders(ctx context.Context, path string) error {
	retry := time.NewTicker(10 * time.Millisecond)
	defer retry.Stop()
	for {
		if ctx.Err() != nil { // before anybody is hurt
			return fmt.Errorf("look for who holds the machine: %w", context.Cause(ctx))
		}
		pids, err := holders(path)
		if err != nil || len(pids) == 0 {
			return err
		}
		var errs []error
		for _, pid := range pids {
			errs = append(errs, killHolder(pid, path))
		}
		if err := errors.Join(errs...); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("processes %v still hold the machine: %w", pids, context.Cause(ctx))
		case <-retry.C:
		}
	}
}

func killHolder(pid int, path string) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open process %d: %w", pid, err)
	}
	defer unix.Close(fd)
	again, err := holders(path)
	if err != nil || !slices.Contains(again, pid) {
		return err
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("kill process %d: %w", pid, err)
	}
	return nil
}
