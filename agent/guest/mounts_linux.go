// Package guest holds the steps by which the agent, as the first process of a
// virtual machine, makes it usable and takes it down again. Each step stands
// alone; the agent decides their order and what runs at the same time.
package guest

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// mount is one kernel file system of the guest.
type mount struct {
	source, target, kind string
	flags                uintptr
	data                 string
	mode                 os.FileMode // of the folder below, when it has to be made
}

// mounts are made in this order; a kernel that lacks one is served without.
func mounts() []mount {
	const strict = unix.MS_NOSUID | unix.MS_NOEXEC | unix.MS_NODEV
	return []mount{
		{"proc", "/proc", "proc", strict, "", 0o755},
		{"sysfs", "/sys", "sysfs", strict, "", 0o755},
		{"devtmpfs", "/dev", "devtmpfs", unix.MS_NOSUID | unix.MS_NOEXEC, "mode=0755", 0o755},
		{"devpts", "/dev/pts", "devpts", unix.MS_NOSUID | unix.MS_NOEXEC, "mode=0620,gid=5,ptmxmode=0666", 0o755},
		{"tmpfs", "/dev/shm", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=1777", 0o755},
		{"tmpfs", "/run", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=0755", 0o755},
		{"tmpfs", "/tmp", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=1777", 0o755},
		{"cgroup2", "/sys/fs/cgroup", "cgroup2", strict, "", 0o755},
	}
}

// links are what programs expect in /dev beside the devices.
func links() map[string]string {
	return map[string]string{
		"/dev/fd": "/proc/self/fd", "/dev/stdin": "/proc/self/fd/0",
		"/dev/stdout": "/proc/self/fd/1", "/dev/stderr": "/proc/self/fd/2",
	}
}

// Mount mounts the kernel's file systems. It goes on after a failure and
// returns all of them.
func Mount() error {
	var failed []error
	for _, m := range mounts() {
		if err := os.MkdirAll(m.target, m.mode); err != nil {
			failed = append(failed, fmt.Errorf("mount %s: %w", m.target, err))
			continue
		}
		if err := unix.Mount(m.source, m.target, m.kind, m.flags, m.data); err != nil && !errors.Is(err, unix.EBUSY) {
			failed = append(failed, fmt.Errorf("mount %s: %w", m.target, err))
		}
	}
	for name, target := range links() {
		if err := os.Symlink(target, name); err != nil && !errors.Is(err, os.ErrExist) {
			failed = append(failed, err)
		}
	}
	return errors.Join(failed...)
}
