package workspaces

import (
	"bufio"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// crashChild changes the registry at path until it is killed and says each
// change that it got back, with the last event's number.
func crashChild(path string) error {
	r, err := Open(path, Options{})
	if err != nil {
		return err
	}
	for n := r.Seq(); ; n++ {
		name := fmt.Sprintf("w%d", n%7)
		if _, err := r.Create(dirSpec(name)); err == nil {
			_, _ = fmt.Fprintln(os.Stdout, r.Seq(), EventCreated, name)
		} else if !errors.Is(err, ErrExists) {
			return err
		}
		want := DesiredRunning
		if n%2 == 0 {
			want = DesiredStopped
		}
		before := r.Seq()
		if _, err := r.SetDesired(name, DefaultTarget, want); err != nil {
			return err
		}
		if r.Seq() != before {
			_, _ = fmt.Fprintln(os.Stdout, r.Seq(), EventDesired, name)
		}
		if n%3 == 0 {
			if err := r.Delete(name); err != nil {
				return err
			}
			_, _ = fmt.Fprintln(os.Stdout, r.Seq(), EventDeleted, name)
		}
	}
}

// TestKill kills a process in the middle of its changes, again and again: what
// it was told is done is there, and events have no gap.
func TestKill(t *testing.T) {
	path := filepath.Join(t.TempDir(), "registry.db")
	alive := make(map[string]bool)
	var seq uint64
	for range 12 {
		acked := runAndKill(t, path, 5+rand.IntN(60))
		r, err := Open(path, Options{})
		if err != nil {
			t.Fatal(err)
		}
		events, err := r.Events(seq)
		if err != nil {
			t.Fatal(err)
		}
		for i, e := range events {
			if e.Seq != seq+1 {
				t.Fatalf("event %d follows %d", e.Seq, seq)
			}
			seq = e.Seq
			if i < len(acked) {
				if want := fmt.Sprintln(e.Seq, e.Kind, e.Workspace); acked[i] != strings.TrimSpace(want) {
					t.Fatalf("told %q, found %q", acked[i], want)
				}
			}
			switch e.Kind {
			case EventCreated:
				alive[e.Workspace] = true
			case EventDeleted:
				delete(alive, e.Workspace)
			}
		}
		if len(events) < len(acked) {
			t.Fatalf("told %d changes, found %d", len(acked), len(events))
		}
		var names []string
		addresses := make(map[string]bool)
		for _, w := range r.List() {
			names = append(names, w.Name)
			addresses[w.Address.String()] = true
		}
		if want := slices.Sorted(maps.Keys(alive)); !slices.Equal(names, want) {
			t.Fatalf("got workspaces %v, the events say %v", names, want)
		}
		if len(addresses) != len(names) || len(r.Broken()) != 0 {
			t.Fatalf("%d addresses for %d workspaces, broken: %v", len(addresses), len(names), r.Broken())
		}
		must(t, r.Close())
	}
	t.Logf("%d events over 12 kills", seq)
}

// runAndKill starts the child and kills it after it said n lines. It returns
// every line that came.
func runAndKill(t *testing.T, path string, n int) []string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), crashEnv+"="+path)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	var lines []string
	for s := bufio.NewScanner(out); s.Scan(); {
		if lines = append(lines, s.Text()); len(lines) == n {
			must(t, cmd.Process.Kill())
		}
	}
	err = cmd.Wait()
	var exit *exec.ExitError
	if len(lines) < n || !errors.As(err, &exit) {
		t.Fatalf("child said %d lines and ended with %v", len(lines), err)
	}
	return lines
}

func TestLocked(t *testing.T) {
	path := filepath.Join(t.TempDir(), "registry.db")
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), crashEnv+"="+path)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	if !bufio.NewScanner(out).Scan() {
		t.Error("the child said nothing")
	}
	start := time.Now()
	if _, err := Open(path, Options{}); !errors.Is(err, ErrLocked) {
		t.Errorf("got %v, want ErrLocked", err)
	}
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("took %v to say so", took)
	}
	must(t, cmd.Process.Kill())
	if err := cmd.Wait(); err == nil {
		t.Error("the child ended well")
	}
	open(t, path, Options{})
}
