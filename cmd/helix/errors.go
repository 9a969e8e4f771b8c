package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"helix.local/helix/gateway/api"
)

// The exit codes; exitCodesText is their documentation.
const (
	exitOther       = 1
	exitUsage       = 2
	exitNotFound    = 3
	exitConflict    = 4
	exitNoGateway   = 5
	exitUnavailable = 6
	exitConnection  = 255 // of exec and ssh, as OpenSSH has it
	exitSignal      = 128 // and the number of the signal
)

const exitCodesText = `Exit codes of helix:

    0  done
    1  any other error
    2  the command line or a value in it is wrong
    3  no such workspace, image, key or service
    4  conflict: the name is taken, the image is in use, the state does not allow it
    5  no gateway is running on this state folder (start one: helix up)
    6  the workspace cannot be reached, or its start or stop failed
  128+n  helix was ended by signal n (130: Ctrl-C)

exec and ssh end with the exit code of the command that ran in the workspace,
with 128+n when signal n killed that command, and with 255 when the workspace
could not be reached or the connection was lost.`

func exitCodesTopic() *cobra.Command {
	return &cobra.Command{Use: "exit-codes", Short: "What the exit codes mean", Long: exitCodesText}
}

// exitError ends the program with a code. Without Err it says nothing: the
// remote command has said it already.
type exitError struct {
	code int
	Err  error
}

func (e *exitError) Error() string {
	if e.Err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.Err.Error()
}

func (e *exitError) Unwrap() error { return e.Err }

// usageError is a fault in the command line.
type usageError struct{ Message, Cure string }

func (e *usageError) Error() string { return e.Message }

// Hint is where to read on.
func (e *usageError) Hint() string { return e.Cure }

func usagef(cure, format string, args ...any) error {
	return &usageError{Message: fmt.Sprintf(format, args...), Cure: cure}
}

// hintError adds what to do next to an error.
type hintError struct {
	error
	Cure string
}

func (e *hintError) Unwrap() error { return e.error }

// Hint is what to do next.
func (e *hintError) Hint() string { return e.Cure }

// failedError reports a workspace that did not get where it was asked to go.
type failedError struct {
	Doing   string // `create "x"`
	Stage   string // "" when no stage was reached
	Message string
	Cure    string
	Console []string // its last lines
}

func (e *failedError) Error() string {
	if e.Stage == "" {
		return fmt.Sprintf("%s: %s", e.Doing, e.Message)
	}
	return fmt.Sprintf("%s: stage %s: %s", e.Doing, e.Stage, e.Message)
}

// Hint is what to do next, "" when nothing is known.
func (e *failedError) Hint() string { return e.Cure }

// exitCode is the code that goes with err, which is not nil.
func exitCode(err error) int {
	if e, ok := errors.AsType[*exitError](err); ok {
		return e.code
	}
	if e, ok := errors.AsType[signalError](err); ok {
		return exitSignal + int(e.signal)
	}
	if _, ok := errors.AsType[*usageError](err); ok {
		return exitUsage
	}
	if _, ok := errors.AsType[*failedError](err); ok {
		return exitUnavailable
	}
	if errors.Is(err, api.ErrNoGateway) {
		return exitNoGateway
	}
	if e, ok := errors.AsType[*api.Error](err); ok {
		return codeExit(e.Code)
	}
	if e, ok := errors.AsType[interface { // what the gateway itself makes, in "helix up"
		error
		Code() api.Code
	}](err); ok {
		return codeExit(e.Code())
	}
	return exitOther
}

func codeExit(c api.Code) int {
	switch c {
	case api.CodeInvalid:
		return exitUsage
	case api.CodeNotFound:
		return exitNotFound
	case api.CodeConflict:
		return exitConflict
	case api.CodeUnavailable:
		return exitUnavailable
	}
	return exitOther
}

// report prints err for a person and returns the exit code. Joined errors are
// printed one by one; the first decides the code.
func (a *app) report(err error) int {
	if err == nil {
		return 0
	}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		code := 0
		for _, each := range joined.Unwrap() {
			if c := a.report(each); code == 0 {
				code = c
			}
		}
		return code
	}
	if e, ok := err.(*exitError); ok && e.Err == nil {
		return e.code
	}
	a.notef("helix: %s\n", clean(err.Error()))
	if e, ok := errors.AsType[*failedError](err); ok {
		for _, line := range e.Console {
			a.notef("  | %s\n", clean(line))
		}
	}
	if hint := a.hint(err); hint != "" {
		a.notef("hint: %s\n", clean(hint))
	}
	return exitCode(err)
}

func (a *app) hint(err error) string {
	if e, ok := errors.AsType[interface {
		error
		Hint() string
	}](err); ok {
		return e.Hint()
	}
	if errors.Is(err, api.ErrNoGateway) {
		if a.stateFlag != "" {
			return "start it: helix up --state " + quote(a.stateFlag)
		}
		return "start it: helix up"
	}
	return ""
}

// notef writes to standard error, where nothing can be done about an error.
func (a *app) notef(format string, args ...any) {
	_, _ = fmt.Fprintf(a.stderr, format, args...) // no place is left to report it
}

// interrupted replaces the error of a call that ctx has ended by one that says
// what goes on; err otherwise.
func interrupted(ctx context.Context, err error, doing, cure string) error {
	cause, ok := errors.AsType[signalError](context.Cause(ctx))
	if !ok {
		return err
	}
	return &hintError{fmt.Errorf("%s: %w", doing, cause), cure}
}
