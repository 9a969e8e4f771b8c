package workspaces

import (
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"go.etcd.io/bbolt"
)

// SeenEvery is how often Seen writes for one target at most.
const SeenEvery = time.Minute

// Start is what BeginStart notes of a start.
type Start struct {
	TokenHash []byte    // HashToken of the secret the agent will present
	Expires   time.Time // of that secret
	Stage     Stage     // the first stage; "" is StagePrepare
	Reason    string    // for people, may be ""
}

// Pairing is what an agent presents to be paired.
type Pairing struct {
	TargetID   string
	Generation uint64
	Token      string // the secret itself
	PublicKey  []byte // ed25519; becomes the target's Credential
}

// HashToken returns what is kept of a bootstrap secret. A plain hash does, since
// secrets are 256 random bits.
func HashToken(secret string) []byte {
	h := sha256.Sum256([]byte(secret))
	return h[:]
}

// errUnchanged makes a change end well without a transaction.
var errUnchanged = errors.New("unchanged")

// commit runs one change as one transaction with one event, then shows it to the
// readers. build is called with r.write held and makes the new record, or nil for
// a deletion; name is its key.
func (r *Registry) commit(name string, build func(tx *bbolt.Tx, e *Event) (*Workspace, error)) (*Workspace, error) {
	r.write.Lock()
	defer r.write.Unlock()
	if r.isClosed() {
		return nil, ErrClosed
	}
	e := Event{Time: r.clock().UTC(), Workspace: name}
	var w *Workspace
	err := r.db.Update(func(tx *bbolt.Tx) (err error) {
		if w, err = build(tx, &e); err != nil {
			return err
		}
		if e.Seq, err = tx.Bucket(eventsBucket).NextSequence(); err != nil {
			return fmt.Errorf("number the event: %w", err)
		}
		if err := putEvent(tx, e); err != nil {
			return err
		}
		if name == "" {
			return nil
		}
		return putWorkspace(tx, name, w, e.Seq)
	})
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case name == "": // an event alone
	case w == nil:
		r.unindex(name)
		delete(r.broken, name)
	default:
		r.index(w)
	}
	if r.ring = append(r.ring, e); len(r.ring) > EventsKept {
		r.ring = r.ring[1:]
	}
	r.seq = e.Seq
	close(r.changed)
	r.changed = make(chan struct{})
	return w, nil
}

func (r *Registry) isClosed() bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.closed
}

// putWorkspace writes w, or deletes the record of name when w is nil.
func putWorkspace(tx *bbolt.Tx, name string, w *Workspace, seq uint64) error {
	bucket := tx.Bucket(workspacesBucket)
	if w == nil {
		if err := bucket.Delete([]byte(name)); err != nil {
			return fmt.Errorf("delete record: %w", err)
		}
		return nil
	}
	w.Revision = seq
	record, err := encodeRecord(w)
	if err != nil {
		return err
	}
	if err := bucket.Put([]byte(name), record); err != nil {
		return fmt.Errorf("write record: %w", err)
	}
	return nil
}

// putEvent writes e and lets go of the one that leaves the ring.
func putEvent(tx *bbolt.Tx, e Event) error {
	record, err := encodeRecord(e)
	if err != nil {
		return err
	}
	bucket := tx.Bucket(eventsBucket)
	if err := bucket.Put(key64(e.Seq), record); err != nil {
		return fmt.Errorf("write event: %w", err)
	}
	if e.Seq > EventsKept {
		if err := bucket.Delete(key64(e.Seq - EventsKept)); err != nil {
			return fmt.Errorf("forget an event: %w", err)
		}
	}
	return nil
}

// Note adds an event that changes no record: something that happened to a
// workspace, or to none. Seq and Time are set here.
func (r *Registry) Note(e Event) error {
	_, err := r.commit("", func(_ *bbolt.Tx, own *Event) (*Workspace, error) {
		e.Seq, e.Time = own.Seq, own.Time
		*own = e
		return nil, nil
	})
	return err
}

// change applies fn to a copy of the workspace and commits it. When fn returns
// errUnchanged nothing is written.
func (r *Registry) change(name string, fn func(w *Workspace, e *Event) error) (Workspace, error) {
	var current Workspace
	w, err := r.commit(name, func(_ *bbolt.Tx, e *Event) (*Workspace, error) {
		var err error
		if current, err = r.Get(name); err != nil {
			return nil, err
		}
		changed := current.clone()
		e.ID = changed.ID
		if err := fn(&changed, e); err != nil {
			return nil, err
		}
		return &changed, nil
	})
	if errors.Is(err, errUnchanged) {
		return current, nil
	}
	if err != nil {
		return Workspace{}, fmt.Errorf("change workspace %q: %w", name, err)
	}
	return w.clone(), nil
}

// changeTarget is change for one target; the event tells its state afterwards.
func (r *Registry) changeTarget(name, target string, kind EventKind, fn func(t *Target, now time.Time) error) (Workspace, error) {
	return r.change(name, func(w *Workspace, e *Event) error {
		i := slices.IndexFunc(w.Targets, func(t Target) bool { return t.Name == target })
		if i < 0 {
			names := func(yield func(string) bool) {
				for _, t := range w.Targets {
					if !yield(t.Name) {
						return
					}
				}
			}
			return &NotFoundError{What: "target", Name: target, Nearest: nearest(target, names)}
		}
		t := &w.Targets[i]
		from := t.State
		if err := fn(t, e.Time); err != nil {
			return fmt.Errorf("target %q: %w", target, err)
		}
		e.Kind, e.Target, e.State, e.Stage = kind, t.Name, t.State, t.Stage
		e.Reason, e.Hint, e.Generation = t.Reason, t.Hint, t.Generation
		if kind == EventState {
			e.From = from
		}
		return nil
	})
}

// SetState moves a target. A move that changes nothing writes nothing. Errors:
// ErrIllegalMove, ErrStaleGeneration, *NotFoundError.
func (r *Registry) SetState(name, target string, m Move) (Workspace, error) {
	return r.changeTarget(name, target, EventState, func(t *Target, now time.Time) error {
		before := *t
		if err := t.move(m, now); err != nil {
			return err
		}
		if t.State == before.State && t.Stage == before.Stage && t.Reason == before.Reason && t.Hint == before.Hint {
			return errUnchanged
		}
		return nil
	})
}

// BeginStart moves a target to Starting as its next generation: the credential
// and the token of the last one end, the new token begins. Errors:
// ErrIllegalMove (also when it is starting already), *NotFoundError.
func (r *Registry) BeginStart(name, target string, s Start) (Workspace, error) {
	if len(s.TokenHash) != sha256.Size {
		return Workspace{}, fmt.Errorf("start %q: token hash has %d bytes, want %d", name, len(s.TokenHash), sha256.Size)
	}
	return r.changeTarget(name, target, EventState, func(t *Target, now time.Time) error {
		if t.State == Starting {
			return fmt.Errorf("%w: %s -> %s", ErrIllegalMove, t.State, Starting)
		}
		stage := s.Stage
		if stage == "" {
			stage = StagePrepare
		}
		if err := t.move(Move{To: Starting, Stage: stage, Reason: s.Reason}, now); err != nil {
			return err
		}
		t.Generation++
		t.Token = &Token{Hash: slices.Clone(s.TokenHash), Expires: s.Expires.UTC()}
		t.Credential = nil
		return nil
	})
}

// Pair uses a target's token up and makes the presented key its credential, in
// one transaction. Errors: ErrTokenWrong, ErrTokenUsed, ErrTokenExpired,
// ErrStaleGeneration, *NotFoundError.
func (r *Registry) Pair(p Pairing) (Workspace, error) {
	w, t, err := r.TargetByID(p.TargetID)
	if err != nil {
		return Workspace{}, fmt.Errorf("pair: %w", err)
	}
	if len(p.PublicKey) != ed25519.PublicKeySize {
		return Workspace{}, fmt.Errorf("pair target %q: public key has %d bytes, want %d", t.Name, len(p.PublicKey), ed25519.PublicKeySize)
	}
	return r.changeTarget(w.Name, t.Name, EventPaired, func(t *Target, now time.Time) error {
		switch {
		case t.ID != p.TargetID: // the name was deleted and made again since
			return &NotFoundError{What: "target", Name: p.TargetID}
		case t.Token == nil || subtle.ConstantTimeCompare(t.Token.Hash, HashToken(p.Token)) != 1:
			return ErrTokenWrong
		case p.Generation != t.Generation:
			return fmt.Errorf("%w: start %d speaks, start %d is current", ErrStaleGeneration, p.Generation, t.Generation)
		case !t.Token.Used.IsZero():
			return ErrTokenUsed
		case !now.Before(t.Token.Expires):
			return ErrTokenExpired
		}
		t.Token.Used, t.Token.UsedBy = now, slices.Clone(p.PublicKey)
		t.Credential = slices.Clone(p.PublicKey)
		t.LastSeen = now
		return nil
	})
}

// SetServices replaces the services of a workspace. Errors: *InvalidError.
func (r *Registry) SetServices(name string, services []Service) (Workspace, error) {
	checked, faults := checkServices(services)
	if len(faults) > 0 {
		return Workspace{}, fmt.Errorf("services of %q: %w", name, &InvalidError{Faults: faults})
	}
	return r.change(name, func(w *Workspace, e *Event) error {
		if slices.Equal(w.Services, checked) {
			return errUnchanged
		}
		w.Services, e.Kind = checked, EventServices
		return nil
	})
}

// SetDesired notes what a person wants of a target.
func (r *Registry) SetDesired(name, target string, d Desired) (Workspace, error) {
	return r.changeTarget(name, target, EventDesired, func(t *Target, _ time.Time) error {
		switch {
		case d != DesiredRunning && d != DesiredStopped:
			return fmt.Errorf("desired state %q: not %s or %s", d, DesiredRunning, DesiredStopped)
		case t.Desired == d:
			return errUnchanged
		}
		t.Desired = d
		return nil
	})
}

// Seen notes a sign of life of a target's agent. It writes once in SeenEvery and
// is free otherwise. Errors: *NotFoundError.
func (r *Registry) Seen(targetID string) error {
	w, t, err := r.TargetByID(targetID)
	if err != nil {
		return fmt.Errorf("seen: %w", err)
	}
	if since := r.clock().Sub(t.LastSeen); since >= 0 && since < SeenEvery {
		return nil
	}
	_, err = r.changeTarget(w.Name, t.Name, EventSeen, func(t *Target, now time.Time) error {
		if t.ID != targetID {
			return &NotFoundError{What: "target", Name: targetID}
		}
		t.LastSeen = now
		return nil
	})
	return err
}

// Delete removes a workspace from any state; also one whose record cannot be
// read. Name and addresses are free when it returns. Errors: *NotFoundError.
func (r *Registry) Delete(name string) error {
	_, err := r.commit(name, func(tx *bbolt.Tx, e *Event) (*Workspace, error) {
		e.Kind = EventDeleted
		w, err := r.Get(name)
		if errors.Is(err, ErrBroken) {
			return nil, nil // its addresses are not known, so they stay out of use
		}
		if err != nil {
			return nil, err
		}
		e.ID = w.ID
		return nil, errors.Join(r.giveBack(tx, r.vips, w.Address), r.giveBack(tx, r.backends, w.Backend))
	})
	if err != nil {
		return fmt.Errorf("delete workspace %q: %w", name, err)
	}
	return nil
}

// giveBack leaves out an address from before a change of range.
func (r *Registry) giveBack(tx *bbolt.Tx, p pool, addr netip.Addr) error {
	if !p.network.Contains(addr) {
		return nil
	}
	return p.give(tx, addr)
}
