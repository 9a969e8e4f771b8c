package guest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
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
		if err := Await(ctx, DiskDevice, nil); err != nil {
			return false, err
		}
		if err := mountDisk(DiskDevice, dir); err != nil {
			return false, err
		}
		mounted = true
	}
	if err := os.Chown(dir, uid, gid); err != nil {
		return mounted, fmt.Errorf("hand over the workspace folder: %w", err)
	}
	return mounted, nil
}

// mountDisk mounts ext4 with discard, so that deleted files give their space
// back to the host.
func mountDisk(device, dir string) error {
	f, err := os.Open(device)
	if err != nil {
		return fmt.Errorf("mount the workspace: %w", err)
	}
	label, err := ext4Label(f)
	_ = f.Close() // read only
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
