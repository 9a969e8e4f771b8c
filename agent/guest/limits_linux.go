package guest

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// The open files of one process: the kernel gives the first process 1,024 and
// at most 4,096, which is less than the streams that one session may carry.
// Programs inherit these; a higher soft limit would slow down those that close
// every number up to it.
const (
	softFiles = 64 << 10
	hardFiles = 1 << 20 // the kernel's own ceiling (fs.nr_open)
)

// RaiseLimits lets this process and all it starts open enough files.
func RaiseLimits() error {
	limit := unix.Rlimit{Cur: softFiles, Max: hardFiles}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return fmt.Errorf("raise the limit of open files to %d: %w", softFiles, err)
	}
	return nil
}
