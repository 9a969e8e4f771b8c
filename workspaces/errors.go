package workspaces

import (
	"errors"
	"fmt"
	"strings"
)

var (
	// ErrLocked reports that another process has the registry open.
	ErrLocked = errors.New("registry is in use by another process")
	// ErrClosed reports a registry that was closed.
	ErrClosed = errors.New("registry is closed")
	// ErrNotFound reports that no workspace or target has the asked name.
	ErrNotFound = errors.New("not found")
	// ErrExists reports a name that is taken.
	ErrExists = errors.New("workspace exists")
	// ErrBroken reports a workspace whose record cannot be read.
	ErrBroken = errors.New("record cannot be read")
	// ErrNoAddress reports that every address of a range is in use.
	ErrNoAddress = errors.New("no free address")

	// ErrTokenWrong reports a bootstrap secret that is not the target's.
	ErrTokenWrong = errors.New("token is wrong")
	// ErrTokenUsed reports the right secret, presented a second time.
	ErrTokenUsed = errors.New("token was used before")
	// ErrTokenExpired reports the right secret, presented too late.
	ErrTokenExpired = errors.New("token has expired")
)

// A NotFoundError names what was asked for. It is an ErrNotFound.
type NotFoundError struct {
	What    string // "workspace" or "target"
	Name    string
	Nearest string // what was probably meant, or ""
}

// Error names what is not there.
func (e *NotFoundError) Error() string { return fmt.Sprintf("%s %q: not found", e.What, e.Name) }

// Is makes errors.Is(err, ErrNotFound) true.
func (e *NotFoundError) Is(target error) bool { return target == ErrNotFound }

// Hint proposes the nearest name there is.
func (e *NotFoundError) Hint() string {
	if e.Nearest == "" {
		return ""
	}
	return fmt.Sprintf("did you mean %q?", e.Nearest)
}

// An InvalidError holds every fault found in what was given.
type InvalidError struct {
	Faults []error
}

// Error lists the faults.
func (e *InvalidError) Error() string {
	texts := make([]string, len(e.Faults))
	for i, f := range e.Faults {
		texts[i] = f.Error()
	}
	return strings.Join(texts, "; ")
}

// Unwrap lets errors.Is and errors.As look at each fault.
func (e *InvalidError) Unwrap() []error { return e.Faults }

// Hint is the hint of the first fault that has one.
func (e *InvalidError) Hint() string {
	for _, f := range e.Faults {
		var h interface{ Hint() string }
		if errors.As(f, &h) {
			return h.Hint()
		}
	}
	return ""
}

// A CorruptError reports a registry file that is not one or is damaged as a
// whole. A single bad record is a BrokenRecord instead.
type CorruptError struct {
	Path string
	Err  error
}

// Error names the file.
func (e *CorruptError) Error() string {
	return fmt.Sprintf("registry %s: damaged: %v", e.Path, e.Err)
}

// Unwrap is the cause.
func (e *CorruptError) Unwrap() error { return e.Err }

// Hint says how to go on without losing what is left.
func (e *CorruptError) Hint() string {
	return fmt.Sprintf("restore it from a copy, or move it away to start without any workspace: mv %s %s.damaged", e.Path, e.Path)
}

// A VersionError reports a record written by a newer program.
type VersionError struct {
	Version, Known int
}

// Error names both versions.
func (e *VersionError) Error() string {
	return fmt.Sprintf("record version %d is newer than %d, the newest this program knows", e.Version, e.Known)
}

// Hint says what to do.
func (e *VersionError) Hint() string { return "run the newer helix that wrote it" }
