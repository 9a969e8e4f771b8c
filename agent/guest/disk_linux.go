package guest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// DiskDevice is the disk that holds the workspace.
const DiskDevice = "/dev/vda"

const (
	// diskLabel marks the file system that is the workspace.
	diskLabel = "helix-ws"
	diskTime  = 5 * time.Second
)

// MountWorkspace mounts the machine's disk at dir and gives it to uid and gid.
// A machine without a disk gets a plain folder; mounted tells which.
func MountWorkspace(ctx context.Context, dir string, uid, gid int) (mounted bool, err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return false, fmt.Errorf("make the workspace folder: %w", err)
	}
	if hasVirtio("/sys", virtioBlock) {
		ctx, cancel := context.WithTimeout(ctx, diskTime)
		defer cancel()
		disk, err := openDisk(ctx, DiskDevice)
		if err != nil {
			return false, fmt.Errorf("mount the workspace: %w", err)
		}
		err = mountDisk(disk, dir)
		_ = disk.Close() // read only
		if err != nil {
			return false, err
		}
		mounted = true
	}
	if err := os.Chown(dir, uid, gid); err != nil {
		return mounted, fmt.Errorf("hand over the workspace folder: %w", err)
	}
	return mounted, nil
}

// openDisk waits until the disk is there. Its driver makes the device a moment
// before anybody can open it.
func openDisk(ctx context.Context, device string) (*os.File, error) {
	pause := time.NewTicker(2 * time.Millisecond)
	defer pause.Stop()
	for {
		f, err := os.Open(device)
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENXIO) && !errors.Is(err, unix.ENODEV) {
			return nil, err //nolint:wrapcheck // names the device
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: %w", ctx.Err(), err)
		case <-pause.C:
		}
	}
}

// mountDisk mounts ext4 with discard, so that deleted files give their space
// back to the host.
func mountDisk(f *os.File, dir string) error {
	device := f.Name()
	label, err := ext4Label(f)
	if err != nil {
		return fmt.Errorf("mount the workspace: %s: %w", device, err)
	}
	if label != diskLabel {
		return fmt.Errorf("mount the workspace: %s has the label %q, not %q", device, label, diskLabel)
	}
	if err := unix.Mount(device, dir, "ext4", unix.MS_NODEV|unix.MS_NOSUID|unix.MS_NOATIME, "discard"); err != nil {
		return fmt.Errorf("mount the workspace: %s: %w", device, err)
	}
	return nil
}

// ext4Label reads the volume name from the superblock (ext4 disk layout,
// "The Super Block").
func ext4Label(r io.ReaderAt) (string, error) {
	const offset, magicAt, labelAt, labelSize = 1024, 0x38, 0x78, 16
	var super [labelAt + labelSize]byte
	if _, err := r.ReadAt(super[:], offset); err != nil {
		return "", fmt.Errorf("read superblock: %w", err)
	}
	if binary.LittleEndian.Uint16(super[magicAt:]) != 0xEF53 {
		return "", errors.New("not an ext4 file system")
	}
	label, _, _ := bytes.Cut(super[labelAt:], []byte{0})
	return string(label), nil
}
