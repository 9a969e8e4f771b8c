package workspaces

import (
	"errors"
	"fmt"
	"time"
)

// State is where a target is in its life.
//
//	Stopped -> Starting -> Running -> Stopping -> Stopped
//	Starting, Running, Stopping -> Failed -> Starting
//	Starting, Failed -> Stopping             a start taken back, residue cleaned up
//	any but Deleting -> Unknown -> any       not known now; LastKnown keeps what was
//	any -> Deleting                          left only by the record's deletion
//
// A state may also be entered again from itself, to change its stage or reason.
type State string

// The states.
const (
	Stopped  State = "stopped"
	Starting State = "starting"
	Running  State = "running"
	Stopping State = "stopping"
	Failed   State = "failed"
	Unknown  State = "unknown"
	Deleting State = "deleting"
)

// Stage names the step that a start is at. Any text will do; these are the
// names that people meet.
type Stage string

// The usual stages, in their order.
const (
	StagePrepare Stage = "prepare"
	StageDisk    Stage = "disk"
	StageShim    Stage = "shim"
	StageQEMU    Stage = "qemu"
	StageNetwork Stage = "network"
	StageBoot    Stage = "boot"
	StagePair    Stage = "pair"
	StageHealth  Stage = "health"
)

// Move asks for a state.
type Move struct {
	To     State
	Stage  Stage  // with Starting and Failed; "" with Failed keeps the stage that was reached
	Reason string // for people, may be ""
	Hint   string // for people, may be ""
	// Generation fences late comers: unless 0, the move is refused with
	// ErrStaleGeneration when the target has been started again since.
	Generation uint64
}

var (
	// ErrIllegalMove reports a move that the drawing at State does not have.
	ErrIllegalMove = errors.New("illegal move")
	// ErrStaleGeneration reports a caller that speaks for an earlier start.
	ErrStaleGeneration = errors.New("stale generation")
)

// legal reports whether the drawing at State has the move.
func legal(from, to State) bool {
	if to == Deleting || from == to {
		return true
	}
	switch from {
	case Stopped:
		return to == Starting || to == Unknown
	case Starting:
		return to == Running || to == Stopping || to == Failed || to == Unknown
	case Running:
		return to == Stopping || to == Failed || to == Unknown
	case Stopping:
		return to == Stopped || to == Failed || to == Unknown
	case Failed:
		return to == Starting || to == Stopping || to == Unknown
	case Unknown:
		return known(to)
	case Deleting:
		return false
	}
	return false
}

func known(s State) bool {
	switch s {
	case Stopped, Starting, Running, Stopping, Failed, Unknown, Deleting:
		return true
	}
	return false
}

// move is the only function that changes a target's state. It leaves t alone
// when it fails.
func (t *Target) move(m Move, now time.Time) error {
	if m.Generation != 0 && m.Generation != t.Generation {
		return fmt.Errorf("%w: start %d speaks, start %d is current", ErrStaleGeneration, m.Generation, t.Generation)
	}
	if !known(m.To) || !legal(t.State, m.To) {
		return fmt.Errorf("%w: %s -> %s", ErrIllegalMove, t.State, m.To)
	}
	if m.To == Unknown && t.State != Unknown {
		t.LastKnown = t.State
	} else if m.To != Unknown {
		t.LastKnown = ""
	}
	switch {
	case m.To == Starting, m.To == Failed && m.Stage != "":
		t.Stage = m.Stage
	case m.To == Failed, m.To == Unknown: // keeps the stage that was reached
	default:
		t.Stage = ""
	}
	if t.State != m.To {
		t.Since = now
	}
	t.State, t.Reason, t.Hint = m.To, m.Reason, m.Hint
	return nil
}
