package agent

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"helix.local/helix/agent/wire"
)

// clockTicks is USER_HZ, which is 100 on every Linux we run on.
const clockTicks = 100

// readStats reads the machine's counters; folder is on the file system whose
// use is told.
func readStats(folder string) (wire.Stats, error) {
	s := wire.Stats{Goroutines: runtime.NumGoroutine()}
	var disk unix.Statfs_t
	if err := unix.Statfs(folder, &disk); err != nil {
		return s, fmt.Errorf("read stats: statfs %s: %w", folder, err)
	}
	block := uint64(disk.Bsize) //nolint:unconvert // the type differs by architecture
	s.DiskTotal, s.DiskUsed = disk.Blocks*block, (disk.Blocks-disk.Bfree)*block
	stat, err1 := os.ReadFile("/proc/stat")
	load, err2 := os.ReadFile("/proc/loadavg")
	memory, err3 := os.ReadFile("/proc/meminfo")
	processes, err4 := os.ReadDir("/proc")
	descriptors, err5 := os.ReadDir("/proc/self/fd")
	if err := errors.Join(err1, err2, err3, err4, err5); err != nil {
		return s, fmt.Errorf("read stats: %w", err)
	}
	s.CPUSeconds = parseCPU(string(stat))
	s.Load1 = parseLoad(string(load))
	s.MemoryTotal, s.MemoryUsed = parseMemory(string(memory))
	for _, e := range processes {
		if _, err := strconv.Atoi(e.Name()); err == nil {
			s.Processes++
		}
	}
	s.Descriptors = len(descriptors)
	return s, nil
}

// parseCPU adds up the busy columns of the first line of /proc/stat: all but
// idle and iowait, and not guest time, which user time contains.
func parseCPU(stat string) float64 {
	line, _, _ := strings.Cut(stat, "\n")
	fields := strings.Fields(line)
	busy := uint64(0)
	for i, f := range fields {
		if i == 0 || i == 4 || i == 5 || i > 8 {
			continue
		}
		n, err := strconv.ParseUint(f, 10, 64)
		if err != nil {
			return 0
		}
		busy += n
	}
	return float64(busy) / clockTicks
}

func parseLoad(loadavg string) float64 {
	first, _, _ := strings.Cut(loadavg, " ")
	load, err := strconv.ParseFloat(first, 64)
	if err != nil {
		return 0
	}
	return load
}

func parseMemory(meminfo string) (total, used uint64) {
	var available uint64
	for line := range strings.Lines(meminfo) {
		name, rest, _ := strings.Cut(line, ":")
		text, _, _ := strings.Cut(strings.TrimSpace(rest), " ")
		n, err := strconv.ParseUint(text, 10, 54)
		if err != nil {
			continue
		}
		switch name {
		case "MemTotal":
			total = n << 10
		case "MemAvailable":
			available = n << 10
		}
	}
	return total, total - min(available, total)
}
