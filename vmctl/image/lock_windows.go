package image

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/windows"
)

// lock keeps other processes from changing the store. The lock dies with its
// process, so there is nothing to clean up after a crash.
func (s *Store) lock() (unlock func(), err error) {
	f, err := os.OpenFile(s.path("lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock image store: %w", err)
	}
	const flags = windows.LOCKFILE_EXCLUSIVE_LOCK | windows.LOCKFILE_FAIL_IMMEDIATELY
	if err := windows.LockFileEx(windows.Handle(f.Fd()), flags, 0, 1, 0, new(windows.Overlapped)); err != nil {
		_ = f.Close() // nothing was written
		if errors.Is(err, windows.ERROR_LOCK_VIOLATION) {
			return nil, ErrBusy
		}
		return nil, fmt.Errorf("lock image store: %w", err)
	}
	return func() { _ = f.Close() }, nil // closing gives the lock back
}
