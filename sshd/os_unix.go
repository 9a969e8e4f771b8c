//go:build unix

package sshd

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
)

// modeCounts says that permission bits mean something on this system.
const modeCounts = true

// syncFolder makes a rename in folder survive a power cut.
func syncFolder(folder string) error {
	f, err := os.Open(folder)
	if err != nil {
		return fmt.Errorf("sync folder: %w", err)
	}
	err = f.Sync()
	if errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.ENOTSUP) {
		err = nil // the file system has no such thing
	}
	return errors.Join(err, f.Close())
}

// giveTo makes path belong to whoever owns the file that info describes.
func giveTo(path string, info fs.FileInfo) error {
	want, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return nil
	}
	now, err := os.Stat(path)
	if err != nil {
		return err
	}
	if have, ok := now.Sys().(*syscall.Stat_t); ok && have.Uid == want.Uid && have.Gid == want.Gid {
		return nil
	}
	return os.Chown(path, int(want.Uid), int(want.Gid))
}
