package workspaces

import (
	"context"
	"fmt"
	"iter"
	"slices"
	"time"
)

// EventKind says what changed.
type EventKind string

// The kinds of events.
const (
	EventCreated  EventKind = "created"
	EventDeleted  EventKind = "deleted"
	EventState    EventKind = "state"    // State, Stage, Reason, Hint or Generation of a target
	EventPaired   EventKind = "paired"   // a target's agent has its credential
	EventServices EventKind = "services" // the services of the workspace
	EventDesired  EventKind = "desired"  // what a person wants of a target
	EventSeen     EventKind = "seen"     // LastSeen of a target
)

// Event is one change, numbered without gaps over the life of the registry file.
type Event struct {
	Seq        uint64    `json:"seq"`
	Time       time.Time `json:"time"`
	Kind       EventKind `json:"kind"`
	Workspace  string    `json:"workspace"` // name
	ID         string    `json:"id"`        // of the workspace
	Target     string    `json:"target,omitempty"`
	From       State     `json:"from,omitempty"`  // EventState: the state before
	State      State     `json:"state,omitempty"` // of Target, after the change
	Stage      Stage     `json:"stage,omitempty"`
	Reason     string    `json:"reason,omitempty"`
	Hint       string    `json:"hint,omitempty"`
	Generation uint64    `json:"generation,omitempty"`
}

// EventsKept is how many events the registry file holds for watchers that come
// back.
const EventsKept = 1000

// LostError tells a watcher which events it will never get: those after After
// and before Next. It should read the registry again.
type LostError struct {
	After, Next uint64
}

// Error says how many events are gone.
func (e *LostError) Error() string {
	if e.Next <= e.After {
		return fmt.Sprintf("events are at %d, before the asked %d", e.Next-1, e.After)
	}
	return fmt.Sprintf("%d events after %d are no longer kept", e.Next-e.After-1, e.After)
}

// Seq is the number of the last event, 0 before the first.
func (r *Registry) Seq() uint64 {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.seq
}

// Events returns the kept events after the one numbered after, oldest first,
// also those of earlier runs. Beside them comes a *LostError when some between
// are no longer kept.
func (r *Registry) Events(after uint64) ([]Event, error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.eventsLocked(after)
}

// eventsLocked takes r.mu held.
func (r *Registry) eventsLocked(after uint64) ([]Event, error) {
	if after == r.seq {
		return nil, nil
	}
	first := r.seq + 1 - uint64(len(r.ring)) // Seq of the oldest kept, or of the next if none is
	if after > r.seq || after+1 < first {
		return slices.Clone(r.ring), &LostError{After: after, Next: first}
	}
	return slices.Clone(r.ring[after+1-first:]), nil
}

// Watch yields the events after the one numbered after, as they come, until ctx
// ends. A watcher never holds up a change: one that is too slow is told with a
// *LostError what it missed, then gets what is still kept. When the registry
// closes, ErrClosed is the last it gets.
func (r *Registry) Watch(ctx context.Context, after uint64) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		for ctx.Err() == nil {
			r.mu.RLock()
			events, lost := r.eventsLocked(after)
			changed, closed, seq := r.changed, r.closed, r.seq
			r.mu.RUnlock()
			if lost != nil && !yield(Event{}, lost) {
				return
			}
			for _, e := range events {
				if ctx.Err() != nil || !yield(e, nil) {
					return
				}
			}
			after = seq
			if closed {
				yield(Event{}, ErrClosed)
				return
			}
			select {
			case <-changed:
			case <-ctx.Done():
			}
		}
	}
}
