package workspaces

import (
	"bytes"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// started makes workspace demo and begins its start with secret.
func started(t *testing.T, r *Registry, clock *testClock, secret string) Target {
	t.Helper()
	create(t, r, "demo")
	w, err := r.BeginStart("demo", DefaultTarget, Start{TokenHash: HashToken(secret), Expires: clock.Now().Add(time.Minute)})
	must(t, err)
	return w.ActiveTarget()
}

func TestPair(t *testing.T) {
	clock := newClock()
	r := tempRegistry(t, Options{Clock: clock.Now})
	tg := started(t, r, clock, "secret")
	if tg.State != Starting || tg.Stage != StagePrepare || tg.Generation != 1 || tg.Credential != nil {
		t.Fatalf("after begin: %+v", tg)
	}
	key := newKey(t)
	good := Pairing{TargetID: tg.ID, Generation: 1, Token: "secret", PublicKey: key}
	with := func(change func(p *Pairing)) Pairing {
		p := good
		change(&p)
		return p
	}
	for name, tt := range map[string]struct {
		p    Pairing
		want error
	}{
		"other target":  {with(func(p *Pairing) { p.TargetID = "nobody" }), ErrNotFound},
		"wrong secret":  {with(func(p *Pairing) { p.Token = "secret2" }), ErrTokenWrong},
		"no secret":     {with(func(p *Pairing) { p.Token = "" }), ErrTokenWrong},
		"earlier start": {with(func(p *Pairing) { p.Generation = 0 }), ErrStaleGeneration},
	} {
		if _, err := r.Pair(tt.p); !errors.Is(err, tt.want) {
			t.Errorf("%s: got %v, want %v", name, err, tt.want)
		}
	}
	if _, err := r.Pair(with(func(p *Pairing) { p.PublicKey = key[:31] })); err == nil || !strings.Contains(err.Error(), "31 bytes") {
		t.Errorf("short key: %v", err)
	}
	w, err := r.Pair(good)
	must(t, err)
	got := w.ActiveTarget()
	if !bytes.Equal(got.Credential, key) || !got.Token.Used.Equal(clock.Now()) || !bytes.Equal(got.Token.UsedBy, key) || !got.LastSeen.Equal(clock.Now()) {
		t.Errorf("after pairing: %+v", got)
	}
	if _, err := r.Pair(good); !errors.Is(err, ErrTokenUsed) {
		t.Errorf("second use: %v", err)
	}
	clock.Add(time.Hour)
	if _, err := r.Pair(good); !errors.Is(err, ErrTokenUsed) {
		t.Errorf("second use, later: %v", err)
	}

	// The next start ends token and credential of this one.
	moveTo(t, r, "demo", Failed)
	w, err = r.BeginStart("demo", DefaultTarget, Start{TokenHash: HashToken("second"), Expires: clock.Now().Add(time.Minute), Stage: StageDisk})
	must(t, err)
	if got := w.ActiveTarget(); got.Generation != 2 || got.Credential != nil || got.Stage != StageDisk || !got.Token.Used.IsZero() {
		t.Errorf("second start: %+v", got)
	}
	if _, err := r.Pair(good); !errors.Is(err, ErrTokenWrong) {
		t.Errorf("token of the first start: %v", err)
	}
	clock.Add(time.Minute)
	late := Pairing{TargetID: tg.ID, Generation: 2, Token: "second", PublicKey: key}
	if _, err := r.Pair(late); !errors.Is(err, ErrTokenExpired) {
		t.Errorf("at the moment it expires: %v", err)
	}
}

// TestPairOnce: of many who present the secret at once, one is paired.
func TestPairOnce(t *testing.T) {
	clock := newClock()
	r := tempRegistry(t, Options{Clock: clock.Now})
	tg := started(t, r, clock, "secret")
	var paired atomic.Int32
	var all sync.WaitGroup
	for range 10 {
		key := newKey(t)
		all.Go(func() {
			_, err := r.Pair(Pairing{TargetID: tg.ID, Generation: 1, Token: "secret", PublicKey: key})
			if err == nil {
				paired.Add(1)
			} else if !errors.Is(err, ErrTokenUsed) {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if paired.Load() != 1 {
		t.Errorf("%d were paired", paired.Load())
	}
}

func TestPairWithoutToken(t *testing.T) {
	r := tempRegistry(t, Options{})
	w := create(t, r, "demo")
	if _, err := r.Pair(Pairing{TargetID: w.Targets[0].ID, PublicKey: newKey(t)}); !errors.Is(err, ErrTokenWrong) {
		t.Errorf("got %v", err)
	}
}

func TestBeginStartRefused(t *testing.T) {
	clock := newClock()
	r := tempRegistry(t, Options{Clock: clock.Now})
	tg := started(t, r, clock, "one")
	if _, err := r.BeginStart("demo", DefaultTarget, Start{TokenHash: HashToken("two"), Expires: clock.Now()}); !errors.Is(err, ErrIllegalMove) {
		t.Errorf("start while starting: %v", err)
	}
	if _, err := r.BeginStart("demo", DefaultTarget, Start{TokenHash: []byte("short")}); err == nil {
		t.Error("a short hash was taken")
	}
	moveTo(t, r, "demo", Running)
	if _, err := r.BeginStart("demo", DefaultTarget, Start{TokenHash: HashToken("two")}); !errors.Is(err, ErrIllegalMove) {
		t.Errorf("start while running: %v", err)
	}
	if _, now, err := r.TargetByID(tg.ID); err != nil || now.Generation != 1 || !bytes.Equal(now.Token.Hash, HashToken("one")) {
		t.Errorf("a refused start changed the target: %+v, %v", now, err)
	}
}

// TestUnchanged: what changes nothing makes no event.
func TestUnchanged(t *testing.T) {
	clock := newClock()
	r := tempRegistry(t, Options{Clock: clock.Now})
	w := create(t, r, "demo")
	services := []Service{{Name: "web", Port: 80}}
	steps := []struct {
		name   string
		do     func() error
		events uint64
	}{
		{"desired as it is", func() error { _, err := r.SetDesired("demo", DefaultTarget, DesiredStopped); return err }, 0},
		{"desired", func() error { _, err := r.SetDesired("demo", DefaultTarget, DesiredRunning); return err }, 1},
		{"state as it is", func() error { _, err := r.SetState("demo", DefaultTarget, Move{To: Stopped}); return err }, 0},
		{"reason", func() error {
			_, err := r.SetState("demo", DefaultTarget, Move{To: Stopped, Reason: "by hand"})
			return err
		}, 1},
		{"services", func() error { _, err := r.SetServices("demo", services); return err }, 1},
		{"services as they are", func() error { _, err := r.SetServices("demo", services); return err }, 0},
		{"seen", func() error { return r.Seen(w.Targets[0].ID) }, 1},
		{"seen at once", func() error { return r.Seen(w.Targets[0].ID) }, 0},
		{"seen later", func() error { clock.Add(SeenEvery); return r.Seen(w.Targets[0].ID) }, 1},
		{"seen, clock set back", func() error { clock.Add(-time.Hour); return r.Seen(w.Targets[0].ID) }, 1},
	}
	for _, s := range steps {
		before := r.Seq()
		must(t, s.do())
		if got := r.Seq() - before; got != s.events {
			t.Errorf("%s: %d events, want %d", s.name, got, s.events)
		}
	}
}

func TestChangeFaults(t *testing.T) {
	r := tempRegistry(t, Options{})
	create(t, r, "demo")
	if _, err := r.SetServices("demo", []Service{{Name: "a b"}}); !errors.As(err, new(*InvalidError)) {
		t.Errorf("services: %v", err)
	}
	if _, err := r.SetDesired("demo", DefaultTarget, "maybe"); err == nil || !strings.Contains(err.Error(), "maybe") {
		t.Errorf("desired: %v", err)
	}
	if _, err := r.SetState("demo", DefaultTarget, Move{To: Running}); !errors.Is(err, ErrIllegalMove) {
		t.Errorf("state: %v", err)
	}
	if err := r.Seen("nobody"); !errors.Is(err, ErrNotFound) {
		t.Errorf("seen: %v", err)
	}
	for _, err := range []error{
		r.Delete("nobody"),
		func() error { _, err := r.SetServices("nobody", nil); return err }(),
		func() error { _, err := r.SetState("demo", "nobody", Move{To: Starting}); return err }(),
	} {
		if !errors.Is(err, ErrNotFound) {
			t.Errorf("got %v, want ErrNotFound", err)
		}
	}
}
