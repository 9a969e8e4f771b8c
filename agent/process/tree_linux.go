package process

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// Subreaper makes orphaned descendants children of this process instead of
// PID 1's, so that Descendants stays complete.
func Subreaper() error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become subreaper: %w", err)
	}
	return nil
}

// Descendants lists the living processes below pid.
func Descendants(pid int) ([]int, error) {
	all, err := numbered("/proc")
	if err != nil {
		return nil, err
	}
	children := make(map[int][]int, len(all))
	for _, p := range all {
		if stat, err := os.ReadFile("/proc/" + strconv.Itoa(p) + "/stat"); err == nil { // else it is gone
			if parent, state := parseStat(stat); state != 'Z' && state != 'X' && parent > 0 {
				children[parent] = append(children[parent], p)
			}
		}
	}
	found := children[pid]
	for i := 0; i < len(found); i++ {
		found = append(found, children[found[i]]...)
	}
	return found, nil
}

// parseStat reads parent and state from /proc/PID/stat. The command name
// before them may hold anything, also parentheses.
func parseStat(stat []byte) (parent int, state byte) {
	end := bytes.LastIndexByte(stat, ')')
	if end < 0 {
		return 0, 0
	}
	fields := bytes.Fields(stat[end+1:])
	if len(fields) < 2 || len(fields[0]) != 1 {
		return 0, 0
	}
	parent, err := strconv.Atoi(string(fields[1]))
	if err != nil {
		return 0, 0
	}
	return parent, fields[0][0]
}

// numbered lists the entries of folder whose names are numbers.
func numbered(folder string) ([]int, error) {
	dir, err := os.Open(folder)
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	defer func() { _ = dir.Close() }() // read only
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	var found []int
	for _, name := range names {
		if n, err := strconv.Atoi(name); err == nil {
			found = append(found, n)
		}
	}
	return found, nil
}

// EndAll ends the processes that list returns: SIGTERM, then SIGKILL to those
// that are still there after grace. Processes may fork while being ended, so it
// goes on until list is empty or ctx is done.
func EndAll(ctx context.Context, list func() ([]int, error), grace time.Duration) error {
	kill := time.NewTimer(grace)
	defer kill.Stop()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	told := make(map[int]bool)
	killing := false
	for {
		pids, err := list()
		if err != nil || len(pids) == 0 {
			return err
		}
		var failed error
		for _, pid := range pids {
			if err := end(pid, told, killing); err != nil {
				failed = errors.Join(failed, err)
			}
		}
		select {
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("end %d processes: %w", len(pids), ctx.Err()), failed)
		case <-kill.C:
			killing = true
		case <-tick.C:
		}
	}
}

// end sends pid what it has to get now. A stopped process is continued, or it
// would never act on SIGTERM.
func end(pid int, told map[int]bool, killing bool) error {
	sig := unix.SIGTERM
	switch {
	case killing:
		sig = unix.SIGKILL
	case told[pid]:
		return nil
	}
	told[pid] = true
	if err := unix.Kill(pid, sig); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("end process %d: %w", pid, err)
	}
	if err := unix.Kill(pid, unix.SIGHUP); err != nil && !errors.Is(err, unix.ESRCH) { // interactive shells ignore SIGTERM
		return fmt.Errorf("hang up process %d: %w", pid, err)
	}
	if err := unix.Kill(pid, unix.SIGCONT); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("continue process %d: %w", pid, err)
	}
	return nil
}
