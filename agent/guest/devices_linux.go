package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// BootFile is where the firmware interface shows what QEMU was given as
// opt/helix/boot.
const BootFile = "/sys/firmware/qemu_fw_cfg/by_name/opt/helix/boot/raw"

// ControlPort is the name of the serial port that leads to the gateway.
const ControlPort = "org.helix.control"

// The device types of the virtio specification, section 5.
const (
	virtioNet   = "0x0001"
	virtioBlock = "0x0002"
)

// hasVirtio reports whether the machine has a virtio device of kind.
func hasVirtio(sys, kind string) bool {
	files, err := filepath.Glob(sys + "/bus/virtio/devices/*/device")
	if err != nil { // only for a bad pattern
		return false
	}
	for _, f := range files {
		if text, err := os.ReadFile(f); err == nil && strings.TrimSpace(string(text)) == kind {
			return true
		}
	}
	return false
}

// Await waits until path is there, or giveUp is closed. Drivers make their devices when their module
// is loaded, so this takes a moment at most; looking costs less than a netlink
// socket would at boot.
func Await(ctx context.Context, path string, giveUp <-chan struct{}) error {
	pause := time.NewTicker(2 * time.Millisecond)
	defer pause.Stop()
	for {
		if _, err := os.Lstat(path); err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w", path, ctx.Err())
		case <-giveUp:
			return fmt.Errorf("wait for %s: %w", path, fs.ErrNotExist)
		case <-pause.C:
		}
	}
}

// serialDevice finds the device of the named port below sys.
func serialDevice(sys, name string) (string, error) {
	files, err := filepath.Glob(sys + "/class/virtio-ports/*/name")
	if err != nil {
		return "", fmt.Errorf("find serial port: %w", err)
	}
	for _, f := range files {
		if text, err := os.ReadFile(f); err == nil && strings.TrimSpace(string(text)) == name {
			return filepath.Base(filepath.Dir(f)), nil
		}
	}
	return "", fmt.Errorf("find serial port %q: %w", name, fs.ErrNotExist)
}

// OpenControl opens the control port once the gateway's end is open too. Before
// that the port reads as ended, and there is nobody to talk to.
func OpenControl(ctx context.Context) (io.ReadWriteCloser, error) {
	pause := 2 * time.Millisecond
	for {
		device, err := serialDevice("/sys", ControlPort)
		if err == nil {
			var f *os.File
			if f, err = openConnected("/dev/" + device); f != nil {
				return f, nil
			}
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.EBUSY) {
			return nil, err
		}
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return nil, fmt.Errorf("wait for the control port: %w", ctx.Err())
		}
		pause = min(2*pause, 100*time.Millisecond)
	}
}

// openConnected returns nil when the other end is not open.
func openConnected(device string) (*os.File, error) {
	fd, err := unix.Open(device, unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", device, err)
	}
	state := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN | unix.POLLOUT}} //nolint:gosec // small
	if _, err := unix.Poll(state, 0); err != nil && !errors.Is(err, unix.EINTR) {
		return nil, errors.Join(fmt.Errorf("poll %s: %w", device, err), unix.Close(fd))
	}
	if state[0].Revents&unix.POLLHUP != 0 {
		return nil, unix.Close(fd) //nolint:wrapcheck // cannot fail here
	}
	return os.NewFile(uintptr(fd), device), nil
}
