package guest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"helix.local/helix/agent/process"
)

// The event of a pressed power button (include/uapi/linux/input-event-codes.h).
const (
	eventSize = 24 // struct input_event on 64-bit machines
	eventKey  = 1
	keyPower  = 116
	keyDown   = 1
)

// PowerButton calls pressed when the power button is, until ctx is done. It
// returns at once on a machine without one.
func PowerButton(ctx context.Context, pressed func()) error {
	devices, err := filepath.Glob("/dev/input/event*")
	if err != nil { // only for a bad pattern
		return fmt.Errorf("find power button: %w", err)
	}
	var work sync.WaitGroup
	defer work.Wait()
	var failed []error
	for _, d := range devices {
		f, err := os.Open(d)
		if err != nil {
			failed = append(failed, fmt.Errorf("open power button: %w", err))
			continue
		}
		stop := context.AfterFunc(ctx, func() { _ = f.Close() }) // ends the read
		work.Go(func() {
			defer func() { _ = f.Close() }() // read only
			defer stop()
			readButton(f, pressed)
		})
	}
	return errors.Join(failed...)
}

func readButton(r io.Reader, pressed func()) {
	event := make([]byte, eventSize)
	for {
		if _, err := io.ReadFull(r, event); err != nil {
			return // closed, or the device is gone
		}
		if isPowerPress(event) {
			pressed()
		}
	}
}

func isPowerPress(event []byte) bool {
	return binary.NativeEndian.Uint16(event[16:]) == eventKey &&
		binary.NativeEndian.Uint16(event[18:]) == keyPower &&
		binary.NativeEndian.Uint32(event[20:]) == keyDown
}

// EndPrograms ends every process but this one and the kernel's own.
func EndPrograms(ctx context.Context, grace time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, grace+2*time.Second)
	defer cancel()
	return process.EndAll(ctx, programs, grace) //nolint:wrapcheck // says what
}

// programs lists the living processes that have a program, which threads of the
// kernel and the dead have not.
func programs() ([]int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	var found []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		if _, err := os.Readlink("/proc/" + e.Name() + "/exe"); err == nil {
			found = append(found, pid)
		}
	}
	return found, nil
}

// How the machine goes down.
const (
	PowerOff = unix.LINUX_REBOOT_CMD_POWER_OFF
	Restart  = unix.LINUX_REBOOT_CMD_RESTART
)

// Down writes everything to disk, lets go of the workspace and ends the
// machine. It returns only on failure.
func Down(workspace string, how int) error {
	unix.Sync()
	var failed []error
	if err := unix.Unmount(workspace, 0); err != nil && !errors.Is(err, unix.EINVAL) { // EINVAL: not mounted
		failed = append(failed, fmt.Errorf("unmount %s: %w", workspace, err))
		if err := unix.Mount("", workspace, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
			failed = append(failed, fmt.Errorf("make %s read-only: %w", workspace, err))
		}
		unix.Sync()
	}
	if err := unix.Reboot(how); err != nil {
		failed = append(failed, fmt.Errorf("end the machine: %w", err))
	}
	return errors.Join(failed...)
}

// maxSkew is how far the clock may be off before it is stepped. Less is left
// alone: a step disturbs programs more.
const maxSkew = 500 * time.Millisecond

// SetClock steps the clock to now when it is off by more than half a second,
// and reports by how much it was.
func SetClock(now time.Time) (off time.Duration, stepped bool, err error) {
	off = time.Until(now)
	if off.Abs() <= maxSkew {
		return off, false, nil
	}
	tv := unix.NsecToTimeval(now.UnixNano())
	if err := unix.Settimeofday(&tv); err != nil {
		return off, false, fmt.Errorf("set clock: %w", err)
	}
	return off, true, nil
}
