package ports

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
)

// listeners reads both tables of this network namespace.
func listeners() ([]Listener, error) {
	var all []Listener
	for _, table := range []string{"/proc/self/net/tcp", "/proc/self/net/tcp6"} {
		f, err := os.Open(table)
		if errors.Is(err, fs.ErrNotExist) { // a kernel without IPv6
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read socket table: %w", err)
		}
		found, err := parseTable(f)
		_ = f.Close() // read only
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	return all, nil
}

// owners finds which of the processes hold the wanted sockets. Processes that
// end meanwhile or may not be looked into are passed over.
func owners(processes func() ([]int, error), wanted map[uint64]bool) (map[uint64]owner, error) {
	found := make(map[uint64]owner, len(wanted))
	if len(wanted) == 0 {
		return found, nil
	}
	if processes == nil {
		processes = allProcesses
	}
	pids, err := processes()
	if err != nil {
		return nil, err
	}
	for _, pid := range pids {
		for _, inode := range sockets(pid) {
			if _, have := found[inode]; wanted[inode] && !have {
				found[inode] = owner{pid, commandName(pid)}
			}
		}
		if len(found) == len(wanted) {
			break
		}
	}
	return found, nil
}

func allProcesses() ([]int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	var pids []int
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// sockets lists the inodes of pid's open sockets.
func sockets(pid int) []uint64 {
	folder := "/proc/" + strconv.Itoa(pid) + "/fd/"
	dir, err := os.Open(folder)
	if err != nil {
		return nil
	}
	defer func() { _ = dir.Close() }() // read only
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil
	}
	var inodes []uint64
	for _, name := range names {
		link, err := os.Readlink(folder + name)
		if err != nil {
			continue
		}
		if text, ok := strings.CutPrefix(link, "socket:["); ok {
			if inode, err := strconv.ParseUint(strings.TrimSuffix(text, "]"), 10, 64); err == nil {
				inodes = append(inodes, inode)
			}
		}
	}
	return inodes
}

func commandName(pid int) string {
	name, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/comm")
	if err != nil {
		return ""
	}
	return string(bytes.TrimSpace(name))
}
