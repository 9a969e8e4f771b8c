package workspaces

import (
	"path/filepath"
	"testing"
)

func TestNoteIsAnEventAndChangesNothing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "registry.db")
	r, err := Open(path, Options{})
	if err != nil {
		t.Fatal(err)
	}
	ws, err := r.Create(Spec{Name: "demo", Targets: []TargetSpec{{Kind: KindDir, Dir: &DirSpec{Path: "/"}}}})
	if err != nil {
		t.Fatal(err)
	}
	before := r.Seq()
	if err := r.Note(Event{Kind: "ports", Workspace: "demo", Reason: "80"}); err != nil {
		t.Fatal(err)
	}
	if got, err := r.Get("demo"); err != nil || got.Revision != ws.Revision {
		t.Errorf("record: %v, revision %d, want %d", err, got.Revision, ws.Revision)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if r, err = Open(path, Options{}); err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	events, err := r.Events(before)
	if err != nil || len(events) != 1 {
		t.Fatalf("events after %d: %v, %v", before, events, err)
	}
	if e := events[0]; e.Seq != before+1 || e.Kind != "ports" || e.Workspace != "demo" || e.Reason != "80" || e.Time.IsZero() {
		t.Errorf("event %+v", e)
	}
}
