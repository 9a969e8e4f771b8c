package vmctl

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

// hintFor knows a cure for the usual faults of the machine below.
func hintFor(err error) string {
	var h hinter
	switch {
	case err == nil:
		return ""
	case errors.As(err, &h):
		return h.Hint()
	case errors.Is(err, syscall.ENOSPC):
		return "free some disk space: the state folder's file system is full"
	case errors.Is(err, fs.ErrPermission):
		return "check who owns the state folder: it must belong to you and to nobody else"
	case errors.Is(err, ErrRunning):
		return "stop it first, or let the gateway adopt it"
	}
	return ""
}

// writeJSON replaces path in one step. The file is private.
func writeJSON(path string, v any) error {
	body, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return fmt.Errorf("encode %s: %w", filepath.Base(path), err)
	}
	return writePrivate(path, append(body, '\n'))
}

func writePrivate(path string, body []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".tmp*") // 0600
	if err != nil {
		return fmt.Errorf("write %s: %w", filepath.Base(path), err)
	}
	_, err = f.Write(body)
	if err == nil {
		err = f.Sync()
	}
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("write %s: %w", filepath.Base(path), err), os.Remove(f.Name()))
	}
	return nil
}

// ReadPlan reads the plan of the last start from a run folder's plan.json.
func ReadPlan(path string) (Plan, error) {
	var p Plan
	body, err := os.ReadFile(path)
	if err != nil {
		return p, fmt.Errorf("read plan: %w", err)
	}
	if err := json.Unmarshal(body, &p); err != nil {
		return p, fmt.Errorf("decode plan %s: %w", path, err)
	}
	if p.Version != PlanVersion {
		return p, fmt.Errorf("plan %s has version %d, this program knows %d", path, p.Version, PlanVersion)
	}
	return p, nil
}

// ReadExit tells how the last start in a run folder ended; an error that wraps
// fs.ErrNotExist when nobody could write it down.
func ReadExit(runDir string) (Exit, error) {
	var e Exit
	body, err := os.ReadFile(filepath.Join(runDir, "exit.json"))
	if err != nil {
		return e, fmt.Errorf("read exit: %w", err)
	}
	if err := json.Unmarshal(body, &e); err != nil {
		return e, fmt.Errorf("decode exit: %w", err)
	}
	return e, nil
}

// transient are the files of a run folder that mean nothing without a shim.
func transient(runDir string) ([]string, error) {
	var list []string
	for _, pattern := range []string{"*.sock", "boot.json", "*.tmp*"} {
		found, err := filepath.Glob(filepath.Join(escapeGlob(runDir), pattern))
		if err != nil {
			return nil, fmt.Errorf("list run folder: %w", err)
		}
		list = append(list, found...)
	}
	return list, nil
}

// escapeGlob keeps odd folder names from being patterns.
func escapeGlob(path string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(path)
}

func removeTransient(runDir string) error {
	list, err := transient(runDir)
	if err != nil {
		return err
	}
	var errs []error
	for _, path := range list {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Clean removes what a machine that is gone has left in its run folder: sockets,
// the boot secret, half-made files and the lock. The disk, the console log, the
// plan and the exit stay. It fails with ErrRunning while the machine lives. A
// folder that is not there is clean.
func Clean(runDir string) error {
	if _, err := os.Stat(runDir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	path := filepath.Join(runDir, "shim.lock")
	lock, err := lockRun(path)
	if err != nil {
		return fmt.Errorf("clean %s: %w", runDir, err)
	}
	defer lock.Close()
	if err := errors.Join(removeTransient(runDir), os.Remove(path)); err != nil {
		return fmt.Errorf("clean %s: %w", runDir, err)
	}
	return nil
}

// makeDisk makes the workspace disk unless there is one. It is built under
// another name, so a disk that is there is complete.
func makeDisk(ctx context.Context, d Disk) error {
	if info, err := os.Stat(d.Path); err == nil {
		if info.Size() < d.Bytes { // the workspace was given more room
			return os.Truncate(d.Path, d.Bytes)
		}
		return nil
	}
	if d.Make == "" {
		return &CureError{errors.New("mke2fs is not installed"), "install it: apt-get install e2fsprogs"}
	}
	temp := d.Path + ".tmp"
	f, err := os.OpenFile(temp, os.O_CREATE|os.O_RDWR|os.O_TRUNC, 0o600)
	if err != nil {
		return fmt.Errorf("make disk: %w", err)
	}
	err = errors.Join(f.Truncate(d.Bytes), f.Close())
	if err == nil {
		var complaints bytes.Buffer
		cmd := exec.CommandContext(ctx, d.Make, "-q", "-F", "-t", "ext4", "-L", d.Label, "-m", "0",
			"-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard,root_owner=1000:1000", temp)
		cmd.Stderr = &complaints
		if err = cmd.Run(); err != nil {
			err = fmt.Errorf("%s: %w: %s", filepath.Base(d.Make), err, strings.TrimSpace(complaints.String()))
		}
	}
	if err == nil {
		err = os.Rename(temp, d.Path)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("make disk: %w", err), os.Remove(temp))
	}
	return nil
}
