package tunnel

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"syscall"
	"unicode"

	"helix.local/helix/agent/wire"
)

// Why a stream was not opened. An [OpenError] is each of these by its status.
var (
	ErrRefused   = errors.New("nothing listens")
	ErrTimeout   = errors.New("the target did not answer in time")
	ErrNoService = errors.New("no such service")
	ErrDenied    = errors.New("not allowed")
	ErrDraining  = errors.New("the session takes no new streams")
)

var (
	// ErrClosed reports that the session has ended, for whatever reason; the
	// reason is wrapped beside it.
	ErrClosed = errors.New("session closed")

	// ErrReset reports that a stream was aborted by either end.
	ErrReset = errors.New("stream reset")

	// ErrTooManyStreams reports that a session is at Limits.MaxStreams.
	ErrTooManyStreams = errors.New("too many streams")

	// ErrSilent is the cause of a session's end when the peer sent nothing, not
	// even the answer to a probe.
	ErrSilent = errors.New("the peer went silent")

	// ErrProtocol is the cause of a session's end, or of a failed handshake,
	// when the peer sent what no peer of ours sends.
	ErrProtocol = errors.New("protocol error")

	// ErrGatewayKey reports that the gateway could not prove the expected key.
	ErrGatewayKey = errors.New("the gateway does not own the expected key")
)

// errStopped is the write error of a stream whose peer has closed it: what the
// peer wrote before can still be read.
var errStopped = fmt.Errorf("%w: the peer reads no more", ErrReset)

// OpenError is the agent's answer to an open that did not succeed.
type OpenError struct {
	Request wire.OpenRequest
	Status  wire.Status
	Message string // for people, may be ""
}

// Error names what was opened and the agent's own words.
func (e *OpenError) Error() string {
	text := "open " + describe(e.Request) + ": " + string(e.Status)
	if e.Message != "" && e.Message != string(e.Status) {
		text += ": " + e.Message
	}
	return text
}

// Is reports whether target is the sentinel of the status.
func (e *OpenError) Is(target error) bool {
	sentinel := sentinelOf(e.Status)
	return sentinel != nil && sentinel == target
}

// Hint is the next thing a person can try, or "".
func (e *OpenError) Hint() string {
	switch e.Status {
	case wire.StatusRefused:
		return "start the program that serves " + describe(e.Request) + " in the workspace"
	case wire.StatusDraining:
		return "the target is stopping; try again when it is back"
	default:
		return ""
	}
}

func sentinelOf(s wire.Status) error {
	switch s {
	case wire.StatusRefused:
		return ErrRefused
	case wire.StatusTimeout:
		return ErrTimeout
	case wire.StatusNoService:
		return ErrNoService
	case wire.StatusDenied:
		return ErrDenied
	case wire.StatusDraining:
		return ErrDraining
	default:
		return nil
	}
}

// statusOf turns a handler's error into the reply that says the same.
func statusOf(err error) wire.OpenReply {
	var open *OpenError
	if errors.As(err, &open) {
		return wire.OpenReply{Status: open.Status, Message: open.Message}
	}
	reply := wire.OpenReply{Status: wire.StatusFailed, Message: err.Error()}
	switch {
	case errors.Is(err, ErrRefused), errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, fs.ErrNotExist):
		reply.Status = wire.StatusRefused
	case errors.Is(err, ErrTimeout), errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		reply.Status = wire.StatusTimeout
	case errors.Is(err, ErrNoService):
		reply.Status = wire.StatusNoService
	case errors.Is(err, ErrDenied), errors.Is(err, fs.ErrPermission):
		reply.Status = wire.StatusDenied
	case errors.Is(err, ErrDraining):
		reply.Status = wire.StatusDraining
	}
	return reply
}

// describe names what a request asks for.
func describe(r wire.OpenRequest) string {
	switch {
	case r.Service != "":
		return fmt.Sprintf("service %q", r.Service)
	case r.Port != 0:
		return fmt.Sprintf("port %d", r.Port)
	case r.Unix != "":
		return fmt.Sprintf("socket %q", r.Unix)
	default:
		return "nothing"
	}
}

// RefusedError reports a handshake that the gateway turned down. Both ends
// return it.
type RefusedError struct {
	Reason  wire.Refusal
	Message string // for people, may be ""
}

// Error gives the reason and the gateway's words.
func (e *RefusedError) Error() string {
	if e.Message == "" {
		return "session refused: " + string(e.Reason)
	}
	return "session refused: " + string(e.Reason) + ": " + e.Message
}

// Hint is the next thing a person can try, or "".
func (e *RefusedError) Hint() string {
	switch e.Reason {
	case wire.RefusedVersion:
		return "update the older of the two programs"
	case wire.RefusedToken, wire.RefusedExpired, wire.RefusedGeneration:
		return "restart the target: each start brings a new token"
	case wire.RefusedCredential:
		return "pair the target again"
	case wire.RefusedTarget:
		return "the workspace or target was removed; stop this agent"
	default:
		return ""
	}
}

// maxText bounds words of the peer that reach a person.
const maxText = 300

// plain makes text of the peer fit for a terminal and a log line: no control
// characters, bounded.
func plain(text string) string {
	text = strings.ToValidUTF8(text, "?")
	text = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, text)
	if len(text) > maxText {
		text = strings.ToValidUTF8(text[:maxText], "") + "..."
	}
	return text
}
