//go:build unix

package vmctl

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// lockRun takes the lock of a run folder, or fails with ErrRunning. The lock
// belongs to the open file: a child that inherits it keeps it, so it is free only
// when the shim and its QEMU are both gone.
//
// Who only looks (held) has the lock for a moment too, so one refusal is not
// believed: a machine that runs still holds it after lookTime.
func lockRun(path string) (*os.File, error) {
	deadline := time.Now().Add(lookTime)
	retry := time.NewTicker(lookTime / 20)
	defer retry.Stop()
	for {
		lock, err := lockFile(path, os.O_CREATE|os.O_RDWR)
		if !errors.Is(err, ErrRunning) || time.Now().After(deadline) {
			return lock, err
		}
		<-retry.C
	}
}

// lookTime is far longer than a look at the lock takes.
const lookTime = 100 * time.Millisecond

// held returns nil when nobody holds the lock of a run folder, and ErrRunning
// when somebody does. It makes no file: a folder that was cleaned stays clean.
func held(path string) error {
	lock, err := lockFile(path, os.O_RDWR)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return lock.Close()
}

func lockFile(path string, flags int) (*os.File, error) {
	for {
		f, err := os.OpenFile(path, flags, 0o600)
		if err != nil {
			return nil, fmt.Errorf("lock run folder: %w", err)
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			_ = f.Close() // nothing was written
			if errors.Is(err, unix.EWOULDBLOCK) {
				return nil, ErrRunning
			}
			return nil, fmt.Errorf("lock run folder: %w", err)
		}
		// Clean may have removed the file between the two calls above.
		mine, err := f.Stat()
		if err == nil {
			if now, err := os.Stat(path); err == nil && os.SameFile(mine, now) {
				return f, nil
			}
		}
		_ = f.Close() // a lock on a file that is gone
	}
}

// privateFiles keeps what this process and its children make from other users.
func privateFiles() { unix.Umask(0o077) }
