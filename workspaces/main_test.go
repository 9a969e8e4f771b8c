package workspaces

import (
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// crashEnv makes this test binary the child that TestKill kills.
const crashEnv = "WORKSPACES_CRASH_CHILD"

func TestMain(m *testing.M) {
	if path := os.Getenv(crashEnv); path != "" {
		if err := crashChild(path); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	goleak.VerifyTestMain(m)
}

// testClock is a clock that only moves when told.
type testClock struct {
	mu  sync.Mutex
	now time.Time
}

func newClock() *testClock {
	return &testClock{now: time.Date(2030, 1, 2, 3, 4, 5, 6, time.UTC)}
}

func (c *testClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *testClock) Add(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

func open(t testing.TB, path string, o Options) *Registry {
	t.Helper()
	r, err := Open(path, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

func tempRegistry(t testing.TB, o Options) *Registry {
	t.Helper()
	return open(t, filepath.Join(t.TempDir(), "registry.db"), o)
}

func dirSpec(name string) Spec {
	return Spec{Name: name, Targets: []TargetSpec{{Kind: KindDir, Dir: &DirSpec{Path: "/srv/" + name}}}}
}

func create(t testing.TB, r *Registry, name string) Workspace {
	t.Helper()
	w, err := r.Create(dirSpec(name))
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func newKey(t testing.TB) []byte {
	t.Helper()
	key := make([]byte, 32)
	if _, err := rand.Read(key); err != nil {
		t.Fatal(err)
	}
	return key
}

// must stops the test unless err is nil: for the calls that set a scene.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// moveTo walks target main of the workspace through states.
func moveTo(t testing.TB, r *Registry, name string, states ...State) {
	t.Helper()
	for _, s := range states {
		_, err := r.SetState(name, DefaultTarget, Move{To: s})
		must(t, err)
	}
}
