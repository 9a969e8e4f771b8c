package workspaces

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"reflect"
	"testing"

	"go.etcd.io/bbolt"
)

// churn makes n events on workspace demo.
func churn(t *testing.T, r *Registry, n int) {
	t.Helper()
	for range n {
		_, err := r.SetState("demo", DefaultTarget, Move{To: Stopped, Reason: fmt.Sprintf("after %d", r.Seq())})
		must(t, err)
	}
}

func TestEventsTellTheChange(t *testing.T) {
	clock := newClock()
	r := tempRegistry(t, Options{Clock: clock.Now})
	tg := started(t, r, clock, "secret")
	_, err := r.Pair(Pairing{TargetID: tg.ID, Generation: 1, Token: "secret", PublicKey: newKey(t)})
	must(t, err)
	_, err = r.SetState("demo", DefaultTarget, Move{To: Failed, Reason: "no", Hint: "yes"})
	must(t, err)
	w, err := r.Get("demo")
	must(t, err)
	must(t, r.Delete("demo"))
	want := []Event{
		{Seq: 1, Kind: EventCreated, Target: "main", State: Stopped},
		{Seq: 2, Kind: EventState, Target: "main", From: Stopped, State: Starting, Stage: StagePrepare, Generation: 1},
		{Seq: 3, Kind: EventPaired, Target: "main", State: Starting, Stage: StagePrepare, Generation: 1},
		{Seq: 4, Kind: EventState, Target: "main", From: Starting, State: Failed, Stage: StagePrepare, Reason: "no", Hint: "yes", Generation: 1},
		{Seq: 5, Kind: EventDeleted},
	}
	got, err := r.Events(0)
	must(t, err)
	for i := range want {
		want[i].Workspace, want[i].ID, want[i].Time = "demo", w.ID, clock.Now()
		if !reflect.DeepEqual(got[i], want[i]) {
			t.Errorf("got  %+v\nwant %+v", got[i], want[i])
		}
	}
}

func TestEventsKeptAndLost(t *testing.T) {
	path := filepath.Join(t.TempDir(), "registry.db")
	r := open(t, path, Options{})
	r.db.NoSync = true
	create(t, r, "demo")
	churn(t, r, EventsKept+99)
	must(t, r.db.Sync())
	for range 2 { // as it ran, and after a restart
		last := uint64(EventsKept + 100)
		tests := []struct {
			after uint64
			n     int
			lost  *LostError
		}{
			{last, 0, nil},
			{last - 1, 1, nil},
			{100, EventsKept, nil},
			{99, EventsKept, &LostError{After: 99, Next: 101}},
			{0, EventsKept, &LostError{After: 0, Next: 101}},
			{last + 5, EventsKept, &LostError{After: last + 5, Next: 101}},
		}
		for _, tt := range tests {
			events, err := r.Events(tt.after)
			var lost *LostError
			errors.As(err, &lost)
			if len(events) != tt.n || !reflect.DeepEqual(lost, tt.lost) {
				t.Errorf("after %d: %d events, %v; want %d, %v", tt.after, len(events), err, tt.n, tt.lost)
			}
			if lost != nil && lost.Error() == "" {
				t.Error("no text")
			}
			for i, e := range events {
				if e.Seq != last-uint64(tt.n)+uint64(i)+1 {
					t.Fatalf("after %d: event %d at %d", tt.after, e.Seq, i)
				}
			}
		}
		must(t, r.Close())
		r = open(t, path, Options{})
	}
	stored := 0
	must(t, r.db.View(func(tx *bbolt.Tx) error {
		stored = tx.Bucket(eventsBucket).Stats().KeyN
		return nil
	}))
	if stored != EventsKept {
		t.Errorf("%d events on disk, want %d", stored, EventsKept)
	}
}

func TestBrokenEventLosesThoseBefore(t *testing.T) {
	path := filepath.Join(t.TempDir(), "registry.db")
	r := open(t, path, Options{})
	create(t, r, "demo")
	churn(t, r, 9)
	must(t, r.Close())
	damage(t, path, func(tx *bbolt.Tx) error { return tx.Bucket(eventsBucket).Put(key64(6), []byte("noise")) })
	r = open(t, path, Options{})
	events, err := r.Events(0)
	var lost *LostError
	if !errors.As(err, &lost) || lost.Next != 7 || len(events) != 4 || events[0].Seq != 7 {
		t.Errorf("got %v, %v", events, err)
	}
	churn(t, r, 1)
	if r.Seq() != 11 {
		t.Errorf("seq %d", r.Seq())
	}
}

func TestWatch(t *testing.T) {
	r := tempRegistry(t, Options{})
	create(t, r, "demo")
	churn(t, r, 4)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	read := make(chan Event)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for e, err := range r.Watch(ctx, 2) {
			if err != nil {
				t.Error(err)
				return
			}
			read <- e
		}
	}()
	for want := uint64(3); want <= 5; want++ {
		if e := <-read; e.Seq != want {
			t.Fatalf("got %d, want %d", e.Seq, want)
		}
	}
	churn(t, r, 1) // comes while it waits
	if e := <-read; e.Seq != 6 {
		t.Fatalf("got %d, want 6", e.Seq)
	}
	cancel()
	<-ended
}

// TestWatchSlow: a watcher that does nothing holds nobody up, is told what it
// lost, and goes on; it ends when the registry closes.
func TestWatchSlow(t *testing.T) {
	r := tempRegistry(t, Options{})
	r.db.NoSync = true
	create(t, r, "demo")
	var seqs []uint64
	var lost *LostError
	var last error
	for e, err := range r.Watch(t.Context(), 0) {
		switch {
		case errors.As(err, &lost):
		case err != nil:
			last = err
		default:
			if seqs = append(seqs, e.Seq); e.Seq == 1 {
				churn(t, r, 2*EventsKept) // while the watcher is busy with its first event
			}
			if e.Seq == 2*EventsKept+1 {
				must(t, r.Close())
			}
		}
	}
	if lost == nil || lost.After != 1 || lost.Next != EventsKept+2 {
		t.Errorf("told of loss: %v", lost)
	}
	if len(seqs) != 1+EventsKept || !errors.Is(last, ErrClosed) {
		t.Errorf("%d events, ended with %v", len(seqs), last)
	}
}

func TestWatchStopsWhenToldTo(t *testing.T) {
	r := tempRegistry(t, Options{})
	create(t, r, "demo")
	for range r.Watch(t.Context(), 0) {
		break
	}
	for range r.Watch(t.Context(), 99) { // the loss is the first it gets
		break
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range r.Watch(ctx, 0) {
		t.Error("yields after the end of ctx")
	}
}
