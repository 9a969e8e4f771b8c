package gateway

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// strayRounds bounds endStrays: processes may fork while being ended.
const strayRounds = 100

// endStrays ends what a directory target's agent left behind when it was killed
// itself. Everything an agent starts carries its target in the environment; a
// process that took that out, or changed its user, is not found.
func endStrays(target string) error {
	pause := time.NewTicker(10 * time.Millisecond)
	defer pause.Stop()
	for range strayRounds {
		found, err := strays(target)
		if err != nil || len(found) == 0 {
			return err
		}
		for _, pid := range found {
			if err := endStray(pid, target); err != nil {
				return err
			}
		}
		<-pause.C // a killed process has its environment until it is gone
	}
	return fmt.Errorf("processes of target %s do not end", target)
}

// strays lists the processes that carry the target.
func strays(target string) ([]int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("look for processes left behind: %w", err)
	}
	var found []int
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil && carries(pid, target) {
			found = append(found, pid)
		}
	}
	return found, nil
}

// carries says whether the process has the target in its environment. One that
// ended, or that belongs to somebody else, has not.
func carries(pid int, target string) bool {
	env, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "environ"))
	return err == nil && bytes.Contains(append([]byte{0}, env...), []byte("\x00HELIX_TARGET="+target+"\x00"))
}

// endStray kills one of them. The number is pinned first and looked at again,
// so that no other process is hit if it was given away meanwhile.
func endStray(pid int, target string) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("end process %d left behind: %w", pid, err)
	}
	defer unix.Close(fd)
	if !carries(pid, target) {
		return nil
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("end process %d left behind: %w", pid, err)
	}
	return nil
}
