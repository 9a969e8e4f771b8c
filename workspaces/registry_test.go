package workspaces

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/bbolt"
)

func TestCreateGetListDelete(t *testing.T) {
	path := filepath.Join(t.TempDir(), "registry.db")
	clock := newClock()
	r := open(t, path, Options{Clock: clock.Now})
	spec := Spec{
		Name: "demo",
		Targets: []TargetSpec{
			{Kind: KindVM, VM: &VMSpec{Image: "tiny", MemoryMB: 256}, Desired: DesiredRunning},
			{Name: "box", Kind: KindHost},
		},
		Services: []Service{{Name: "web", Port: 8080}},
	}
	w, err := r.Create(spec)
	must(t, err)
	create(t, r, "alpha")
	main := w.ActiveTarget()
	if w.ID == "" || w.Active != DefaultTarget || main.VM.UUID == "" || main.VM.Policy != PolicyInternet ||
		main.State != Stopped || main.Desired != DesiredRunning || !main.Since.Equal(clock.Now()) || !w.Created.Equal(clock.Now()) {
		t.Errorf("got %+v", w)
	}
	if want := (Service{"web", 8080, ProtocolHTTP, ExposureLocal}); w.Services[0] != want {
		t.Errorf("service: got %+v, want %+v", w.Services[0], want)
	}
	if w.Address != netip.MustParseAddr("127.88.0.2") || w.Backend != netip.MustParseAddr("127.89.0.2") || r.Gateway() != netip.MustParseAddr("127.88.0.1") {
		t.Errorf("addresses: %s %s, gateway %s", w.Address, w.Backend, r.Gateway())
	}
	spec.Targets[0].VM.Image = "changed by the caller"
	w.Targets[0].VM.Image = "changed by the caller"

	must(t, r.Close())
	must(t, r.Close())
	if _, err := r.Create(dirSpec("late")); !errors.Is(err, ErrClosed) {
		t.Errorf("create after close: %v", err)
	}
	r = open(t, path, Options{Clock: clock.Now})
	got, err := r.Get("demo")
	if err != nil || got.ID != w.ID || got.Targets[0].VM.Image != "tiny" || got.Revision != 1 {
		t.Errorf("after reopening: %+v, %v", got, err)
	}
	if list := r.List(); len(list) != 2 || list[0].Name != "alpha" || list[1].Name != "demo" {
		t.Errorf("list: %v", list)
	}
	for _, a := range []netip.Addr{w.Address, w.Backend} {
		if name, ok := r.Owner(a); !ok || name != "demo" {
			t.Errorf("owner of %s: %q %v", a, name, ok)
		}
	}
	if a, ok := r.Address("demo"); !ok || a != w.Address {
		t.Errorf("address: %v %v", a, ok)
	}
	if _, tg, err := r.TargetByID(w.Targets[1].ID); err != nil || tg.Name != "box" {
		t.Errorf("target by ID: %+v %v", tg, err)
	}

	must(t, r.Delete("demo"))
	if err := r.Delete("demo"); !errors.Is(err, ErrNotFound) {
		t.Errorf("second delete: %v", err)
	}
	if _, ok := r.Owner(w.Address); ok {
		t.Error("address still owned")
	}
	if _, ok := r.Address("demo"); ok {
		t.Error("name still answers")
	}
	if _, _, err := r.TargetByID(w.Targets[1].ID); !errors.Is(err, ErrNotFound) {
		t.Errorf("target by ID after delete: %v", err)
	}
	if again := create(t, r, "demo"); again.ID == w.ID || again.Address == w.Address {
		t.Errorf("made again: same ID or address: %+v", again)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
}

func TestDeleteFromEveryState(t *testing.T) {
	ways := map[State][]State{
		Stopped: nil, Starting: {Starting}, Running: {Starting, Running}, Stopping: {Starting, Stopping},
		Failed: {Starting, Failed}, Unknown: {Unknown}, Deleting: {Deleting},
	}
	r := tempRegistry(t, Options{})
	for _, s := range allStates {
		create(t, r, "demo")
		moveTo(t, r, "demo", ways[s]...)
		if w, err := r.Get("demo"); err != nil || w.ActiveTarget().State != s {
			t.Fatalf("%s: got %v %v", s, w, err)
		}
		if err := r.Delete("demo"); err != nil {
			t.Errorf("%s: %v", s, err)
		}
	}
}

func TestCreateFaults(t *testing.T) {
	r := tempRegistry(t, Options{})
	create(t, r, "taken")
	dir := func(path string) []TargetSpec { return []TargetSpec{{Kind: KindDir, Dir: &DirSpec{Path: path}}} }
	vm := func(v VMSpec) []TargetSpec { return []TargetSpec{{Kind: KindVM, VM: &v}} }
	tests := map[string]struct {
		spec Spec
		want []string
	}{
		"everything wrong": {
			Spec{Name: "Bad Name", Targets: dir("relative"), Services: []Service{{Name: "80", Port: 0, Protocol: "gopher", Exposure: "moon"}}},
			[]string{"Bad Name", "relative", "all digits", "port 0", "gopher", "moon"},
		},
		"taken":               {dirSpec("taken"), []string{"workspace exists"}},
		"reserved":            {dirSpec("gw"), []string{"gateway's own name"}},
		"no target":           {Spec{Name: "a"}, []string{"no target"}},
		"no kind":             {Spec{Name: "a", Targets: []TargetSpec{{}}}, []string{`kind ""`}},
		"dir without a path":  {Spec{Name: "a", Targets: []TargetSpec{{Kind: KindDir}}}, []string{"does not go with"}},
		"vm with a directory": {Spec{Name: "a", Targets: []TargetSpec{{Kind: KindVM, Dir: &DirSpec{Path: "/x"}}}}, []string{"does not go with"}},
		"vm sizes":            {Spec{Name: "a", Targets: vm(VMSpec{CPUs: -1, MemoryMB: 1, DiskGB: 1 << 30, Policy: "all"})}, []string{"image", "cpus -1", "memory_mb 1", "disk_gb", `policy "all"`}},
		"same target twice":   {Spec{Name: "a", Targets: append(dir("/a"), dir("/b")...)}, []string{`target "main": the name is given twice`}},
		"target name":         {Spec{Name: "a", Targets: []TargetSpec{{Name: "A B", Kind: KindHost, Desired: "soon"}}}, []string{"upper-case", `"soon"`}},
		"same service twice":  {Spec{Name: "a", Targets: dir("/a"), Services: []Service{{Name: "s", Port: 1}, {Name: "s", Port: 2}}}, []string{`service "s": the name is given twice`}},
	}
	before := r.Seq()
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := r.Create(tt.spec)
			if err == nil {
				t.Fatal("accepted")
			}
			for _, part := range tt.want {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%q is not in: %v", part, err)
				}
			}
		})
	}
	if _, err := r.Create(dirSpec("gw")); !errors.Is(err, ErrReserved) || hintOf(err) == "" {
		t.Errorf("reserved: %v, hint %q", err, hintOf(err))
	}
	if _, err := r.Create(Spec{Name: "a"}); hintOf(err) != "" {
		t.Errorf("hint from nowhere: %q", hintOf(err))
	}
	if r.Seq() != before {
		t.Error("a refused create made an event")
	}
}

func hintOf(err error) string {
	var h interface{ Hint() string }
	if errors.As(err, &h) {
		return h.Hint()
	}
	return ""
}

func TestNotFoundHint(t *testing.T) {
	r := tempRegistry(t, Options{})
	create(t, r, "demo")
	_, err := r.Get("dmeo")
	if !errors.Is(err, ErrNotFound) || hintOf(err) != `did you mean "demo"?` {
		t.Errorf("got %v, hint %q", err, hintOf(err))
	}
	_, err = r.SetState("demo", "mian", Move{To: Starting})
	if !errors.Is(err, ErrNotFound) || hintOf(err) != `did you mean "main"?` {
		t.Errorf("got %v, hint %q", err, hintOf(err))
	}
	if _, err = r.Get("something"); hintOf(err) != "" {
		t.Errorf("hint %q", hintOf(err))
	}
}

func TestOptionFaults(t *testing.T) {
	tests := map[string]Options{
		"127.88.0.1/16: not the first": {Range: netip.MustParsePrefix("127.88.0.1/16")},
		"fd00::/64: not the first":     {Backends: netip.MustParsePrefix("fd00::/64")},
		"127.88.0.0/30: not the first": {Range: netip.MustParsePrefix("127.88.0.0/30")},
		"overlaps":                     {Backends: netip.MustParsePrefix("127.88.1.0/24")},
	}
	for want, o := range tests {
		if _, err := Open(filepath.Join(t.TempDir(), "r"), o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

// TestBrokenRecords: a bad record is listed and refused, stays on disk, keeps
// its name, and nobody else suffers.
func TestBrokenRecords(t *testing.T) {
	path := filepath.Join(t.TempDir(), "registry.db")
	r := open(t, path, Options{})
	for _, name := range []string{"flipped", "newer", "fine"} {
		create(t, r, name)
	}
	must(t, r.Close())
	damage(t, path, func(tx *bbolt.Tx) error {
		b := tx.Bucket(workspacesBucket)
		bad := bytes.Replace(b.Get([]byte("flipped")), []byte(`"dir"`), []byte(`"dor"`), 1)
		return errors.Join(b.Put([]byte("flipped"), bad), b.Put([]byte("newer"), []byte("7 new form")))
	})

	var log bytes.Buffer
	r = open(t, path, Options{Log: slog.New(slog.NewTextHandler(&log, nil))})
	broken := r.Broken()
	if len(broken) != 2 || broken[0].Name != "flipped" || !errors.Is(broken[0].Err, errSum) || !errors.As(broken[1].Err, new(*VersionError)) {
		t.Fatalf("broken: %v", broken)
	}
	if strings.Count(log.String(), "record cannot be read") != 2 {
		t.Errorf("log: %s", log.String())
	}
	if list := r.List(); len(list) != 1 || list[0].Name != "fine" {
		t.Errorf("list: %v", list)
	}
	if _, err := r.Get("newer"); !errors.Is(err, ErrBroken) || hintOf(err) == "" {
		t.Errorf("get: %v, hint %q", err, hintOf(err))
	}
	if _, err := r.Create(dirSpec("flipped")); !errors.Is(err, ErrBroken) {
		t.Errorf("create over it: %v", err)
	}
	if _, err := r.SetDesired("flipped", DefaultTarget, DesiredRunning); !errors.Is(err, ErrBroken) {
		t.Errorf("change it: %v", err)
	}
	moveTo(t, r, "fine", Starting, Running)
	must(t, r.Delete("flipped"))
	if w := create(t, r, "flipped"); w.Address != netip.MustParseAddr("127.88.0.5") {
		t.Errorf("got %s, which the broken one or another may own", w.Address)
	}
	must(t, r.Close())
	r = open(t, path, Options{})
	if broken := r.Broken(); len(broken) != 1 || broken[0].Name != "newer" {
		t.Errorf("after reopening: %v", broken)
	}
}

func damage(t *testing.T, path string, fn func(tx *bbolt.Tx) error) {
	t.Helper()
	db, err := bbolt.Open(path, 0o600, nil)
	must(t, err)
	must(t, db.Update(fn))
	must(t, db.Close())
}

func TestCorruptFile(t *testing.T) {
	whole := func(t *testing.T) []byte {
		path := filepath.Join(t.TempDir(), "registry.db")
		r := open(t, path, Options{})
		for i := range 200 {
			create(t, r, fmt.Sprintf("w%d", i))
		}
		must(t, r.Close())
		data, err := os.ReadFile(path)
		must(t, err)
		return data
	}(t)
	page := os.Getpagesize()
	tests := map[string][]byte{
		"text":         []byte("this is no registry\n"),
		"zeros":        make([]byte, 1<<16),
		"cut to metas": whole[:2*page],
		"cut in half":  whole[:len(whole)/2/page*page],
		"pages wiped":  append(bytes.Clone(whole[:2*page]), make([]byte, len(whole)-2*page)...),
		"pages noise":  append(bytes.Clone(whole[:2*page]), bytes.Repeat([]byte{0xa5}, len(whole)-2*page)...),
	}
	for name, data := range tests {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "registry.db")
			must(t, os.WriteFile(path, data, 0o600))
			_, err := Open(path, Options{})
			var c *CorruptError
			if !errors.As(err, &c) || c.Path != path || c.Hint() == "" || c.Unwrap() == nil {
				t.Fatalf("got %v, want a CorruptError", err)
			}
			if now, err := os.ReadFile(path); err != nil || len(now) < len(data) {
				t.Errorf("the damaged file was changed: %d bytes, %v", len(now), err)
			}
		})
	}
	if _, err := Open(filepath.Join(t.TempDir(), "none", "registry.db"), Options{}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no folder: %v", err)
	}
	if _, err := Open(t.TempDir(), Options{}); err == nil || errors.As(err, new(*CorruptError)) {
		t.Errorf("a folder: %v", err)
	}
}

// TestConcurrent: changes from many sides at once each get their own address
// and event.
func TestConcurrent(t *testing.T) {
	r := tempRegistry(t, Options{})
	var all sync.WaitGroup
	for side := range 8 {
		all.Go(func() {
			for i := range 20 {
				name := fmt.Sprintf("w%d-%d", side, i)
				_, err := r.Create(dirSpec(name))
				_, err2 := r.SetDesired(name, DefaultTarget, DesiredRunning)
				if err := errors.Join(err, err2); err != nil {
					t.Error(err)
				}
				r.List()
			}
		})
	}
	all.Wait()
	seen := make(map[netip.Addr]bool)
	for _, w := range r.List() {
		if seen[w.Address] || seen[w.Backend] {
			t.Errorf("%s: address given twice", w.Name)
		}
		seen[w.Address], seen[w.Backend] = true, true
	}
	if len(seen) != 320 || r.Seq() != 320 {
		t.Errorf("%d addresses, %d events", len(seen), r.Seq())
	}
}

// fill makes workspaces in one transaction, as many creations leave them.
func fill(t *testing.T, r *Registry, from, to int) {
	t.Helper()
	must(t, r.db.Update(func(tx *bbolt.Tx) error {
		for i := from; i < to; i++ {
			w, err := newWorkspace(dirSpec(fmt.Sprintf("w%05d", i)))
			must(t, err)
			w.Address, err = r.vips.take(tx, r.taken)
			must(t, err)
			w.Backend, err = r.backends.take(tx, r.taken)
			must(t, err)
			must(t, putWorkspace(tx, w.Name, &w, 0))
			r.index(&w)
		}
		return nil
	}))
}

// TestMany: the registry stays fast with 10,000 workspaces.
func TestMany(t *testing.T) {
	path := filepath.Join(t.TempDir(), "registry.db")
	r := open(t, path, Options{})
	r.db.NoSync = true // the disk's own time is not what is measured
	const n, part = 10_000, 300
	creates := func(from int) time.Duration {
		start := time.Now()
		for i := range part {
			create(t, r, fmt.Sprintf("w%05d", from+i))
		}
		return time.Since(start) / part
	}
	first := creates(0)
	fill(t, r, part, n-part)
	last := creates(n - part)
	start := time.Now()
	if got := len(r.List()); got != n {
		t.Errorf("list has %d", got)
	}
	list := time.Since(start)
	must(t, r.db.Sync())
	must(t, r.Close())
	start = time.Now()
	r = open(t, path, Options{})
	t.Logf("create: first %v each, last %v each; list %v; open %v", first, last, list, time.Since(start))
	if got := len(r.List()); got != n {
		t.Errorf("after reopening: %d", got)
	}
	if last > 20*first {
		t.Errorf("create slows down: %v, then %v", first, last)
	}
}

func BenchmarkAddress(b *testing.B) {
	r := tempRegistry(b, Options{})
	create(b, r, "demo")
	b.ReportAllocs()
	for b.Loop() {
		if _, ok := r.Address("demo"); !ok {
			b.Fatal("not found")
		}
	}
}

func BenchmarkSetState(b *testing.B) {
	r := tempRegistry(b, Options{})
	create(b, r, "demo")
	for i := 0; b.Loop(); i++ {
		if _, err := r.SetState("demo", DefaultTarget, Move{To: Stopped, Reason: fmt.Sprint(i)}); err != nil {
			b.Fatal(err)
		}
	}
}
