package workspaces

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"testing"
)

func TestAddressesSkipped(t *testing.T) {
	r := tempRegistry(t, Options{Reserved: []netip.Addr{netip.MustParseAddr("127.88.0.3"), netip.MustParseAddr("127.89.1.1")}})
	r.db.NoSync = true
	got := make(map[netip.Addr]bool)
	for i := range 600 {
		w := create(t, r, fmt.Sprintf("w%d", i))
		got[w.Address], got[w.Backend] = true, true
	}
	for _, a := range []string{"127.88.0.0", "127.88.0.1", "127.88.0.3", "127.88.0.255", "127.88.1.0", "127.88.1.255", "127.89.0.1", "127.89.1.1"} {
		if got[netip.MustParseAddr(a)] {
			t.Errorf("%s was handed out", a)
		}
	}
	for _, a := range []string{"127.88.0.2", "127.88.0.4", "127.88.0.254", "127.88.1.1", "127.89.0.2", "127.89.1.2"} {
		if !got[netip.MustParseAddr(a)] {
			t.Errorf("%s was left out", a)
		}
	}
	if len(got) != 1200 {
		t.Errorf("%d addresses", len(got))
	}
}

// TestAddressReuse: never used ones first, then the longest unused; a full range
// is an error and frees up with a deletion.
func TestAddressReuse(t *testing.T) {
	path := filepath.Join(t.TempDir(), "registry.db")
	small := Options{Range: netip.MustParsePrefix("127.88.0.0/29"), Backends: netip.MustParsePrefix("127.89.0.0/24")}
	r := open(t, path, small) // .2 to .7
	for i := 2; i <= 5; i++ {
		create(t, r, fmt.Sprintf("w%d", i))
	}
	must(t, r.Delete("w3"))
	must(t, r.Delete("w2"))
	must(t, r.Close())
	r = open(t, path, small) // the order survives
	for _, want := range []string{"127.88.0.6", "127.88.0.7", "127.88.0.3", "127.88.0.2"} {
		if w := create(t, r, "n"+want[len(want)-1:]); w.Address.String() != want {
			t.Errorf("got %s, want %s", w.Address, want)
		}
	}
	seq := r.Seq()
	if _, err := r.Create(dirSpec("full")); !errors.Is(err, ErrNoAddress) || r.Seq() != seq {
		t.Errorf("full range: %v, seq %d -> %d", err, seq, r.Seq())
	}
	must(t, r.Delete("w4"))
	if w := create(t, r, "more"); w.Address.String() != "127.88.0.4" {
		t.Errorf("got %s", w.Address)
	}
}

// TestRangeChange: workspaces keep the addresses they have, new ones come from
// the new range, and an address still owned is not given out when the first
// range comes back.
func TestRangeChange(t *testing.T) {
	path := filepath.Join(t.TempDir(), "registry.db")
	r := open(t, path, Options{})
	create(t, r, "old1")
	create(t, r, "old2")
	must(t, r.Close())
	r = open(t, path, Options{Range: netip.MustParsePrefix("127.99.0.0/16")})
	if w := create(t, r, "new"); w.Address.String() != "127.99.0.2" || w.Backend.String() != "127.89.0.4" {
		t.Errorf("got %s and %s", w.Address, w.Backend)
	}
	must(t, r.Delete("old1")) // its address is of neither range now
	must(t, r.Close())
	r = open(t, path, Options{})
	if w := create(t, r, "again"); w.Address.String() != "127.88.0.2" {
		t.Errorf("got %s", w.Address)
	}
	if w := create(t, r, "again2"); w.Address.String() != "127.88.0.4" {
		t.Errorf("got %s, old2 has .3", w.Address)
	}
}
