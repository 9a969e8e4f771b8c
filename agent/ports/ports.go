// Package ports knows which TCP ports the programs of a target listen on.
//
// A Watch looks at the kernel's table on demand and, while somebody watches, at
// an interval. Of a whole machine it takes every listener; of a folder on a
// shared machine only the listeners of its own processes, so that two folders
// may use one port number.
package ports

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"helix.local/helix/agent/wire"
)

// DefaultInterval is the pause between two looks while somebody watches.
const DefaultInterval = 300 * time.Millisecond

// Listener is one listening TCP socket.
type Listener struct {
	Addr  netip.AddrPort
	Inode uint64 // of the socket; 0 when the system does not tell
}

// owner is the process that holds a listener.
type owner struct {
	pid  int
	name string
}

// Config says what to watch. The zero value watches the whole machine.
type Config struct {
	// Processes lists the only processes that count; nil means all.
	Processes func() ([]int, error)
	// Prefer is dialled before other addresses of a port, when it is listened on.
	Prefer netip.Addr
	// Interval is the pause between two looks; 0 means DefaultInterval.
	Interval time.Duration
	// Log may be nil.
	Log *slog.Logger
}

// Watch knows the listeners. Its methods may be called concurrently.
type Watch struct {
	cfg Config
	log *slog.Logger

	mu     sync.Mutex // held across a scan: two at a time would only do the same
	last   []Listener
	looks  int              // since strangers were looked at
	owners map[uint64]owner // of last, by inode
	owned  []Listener       // those of last that count
}

// New returns a Watch that has not looked yet.
func New(cfg Config) *Watch {
	if cfg.Interval == 0 {
		cfg.Interval = DefaultInterval
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Watch{cfg: cfg, log: cfg.Log}
}

// List looks and returns what listens now, by port and address.
func (w *Watch) List() ([]wire.Port, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.scanLocked(false); err != nil {
		return nil, err
	}
	found := make([]wire.Port, 0, len(w.owned))
	for _, l := range w.owned {
		o := w.owners[l.Inode]
		found = append(found, wire.Port{Port: l.Addr.Port(), Address: l.Addr.Addr().String(), Process: o.name, PID: o.pid})
	}
	return found, nil
}

// strangerLooks is how many unchanged looks pass before listeners of others are
// looked at again. A socket that was handed over does not show in the table.
const strangerLooks = 5

// scanLocked reads the table and, when it has changed, who owns what. Thorough
// also asks again about listeners that belonged to nobody of ours. Caller holds mu.
func (w *Watch) scanLocked(thorough bool) error {
	now, err := listeners()
	if err != nil {
		return err
	}
	slices.SortFunc(now, func(a, b Listener) int {
		return cmp.Or(cmp.Compare(a.Addr.Port(), b.Addr.Port()), a.Addr.Addr().Compare(b.Addr.Addr()), cmp.Compare(a.Inode, b.Inode))
	})
	now = slices.Compact(now)
	w.looks++
	if w.owners != nil && slices.Equal(now, w.last) && !thorough &&
		(w.looks < strangerLooks || w.cfg.Processes == nil || len(w.owned) == len(now)) {
		return nil
	}
	w.looks = 0
	wanted := make(map[uint64]bool)
	for _, l := range now {
		if _, known := w.owners[l.Inode]; !known {
			wanted[l.Inode] = true
		}
	}
	found, err := owners(w.cfg.Processes, wanted)
	if err != nil {
		return err
	}
	w.last, w.owned = now, nil
	kept := make(map[uint64]owner, len(now))
	for _, l := range now {
		o, ok := found[l.Inode]
		if known, before := w.owners[l.Inode]; before {
			o, ok = known, true
		}
		if ok {
			kept[l.Inode] = o
		}
		if ok || w.cfg.Processes == nil {
			w.owned = append(w.owned, l)
		}
	}
	w.owners = kept
	return nil
}

// Follow calls changed with the ports of now and again at every change, until
// ctx is done or changed fails.
func (w *Watch) Follow(ctx context.Context, changed func([]wire.Port) error) error {
	tick := time.NewTicker(w.cfg.Interval)
	defer tick.Stop()
	var told []wire.Port
	for first := true; ; first = false {
		now, err := w.List()
		if err != nil {
			return err
		}
		if first || !slices.Equal(now, told) {
			if err := changed(now); err != nil {
				return err
			}
			told = now
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// Dial connects to port at an address that is really listened on. When nothing
// listens the error is syscall.ECONNREFUSED.
func (w *Watch) Dial(ctx context.Context, port uint16) (*net.TCPConn, error) {
	addrs, err := w.find(port)
	if err != nil {
		return nil, err
	}
	failed := fmt.Errorf("dial port %d: nothing listens: %w", port, syscall.ECONNREFUSED)
	for _, addr := range addrs {
		var dialer net.Dialer
		conn, err := dialer.DialContext(ctx, "tcp", addr.String())
		if err == nil {
			if tcp, ok := conn.(*net.TCPConn); ok {
				return tcp, nil
			}
			err = errors.Join(errors.New("not a TCP connection"), conn.Close())
		}
		failed = fmt.Errorf("dial port %d: %w", port, err)
	}
	return nil, failed
}

// find looks for the listeners of port.
func (w *Watch) find(port uint16) ([]netip.AddrPort, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.scanLocked(false); err != nil {
		return nil, err
	}
	addrs := targets(w.owned, port, w.cfg.Prefer)
	if len(addrs) > 0 || len(targets(w.last, port, w.cfg.Prefer)) == 0 {
		return addrs, nil
	}
	if err := w.scanLocked(true); err != nil { // somebody listens: perhaps it is ours by now
		return nil, err
	}
	return targets(w.owned, port, w.cfg.Prefer), nil
}

// targets are the addresses to dial for port, best first: the preferred one,
// loopback, wildcards by their loopback, any other.
func targets(owned []Listener, port uint16, prefer netip.Addr) []netip.AddrPort {
	rank := func(a netip.Addr) int {
		switch {
		case a == prefer:
			return 0
		case a.IsLoopback():
			return 1
		case a.IsUnspecified():
			return 2
		}
		return 3
	}
	var found []netip.Addr
	for _, l := range owned {
		if l.Addr.Port() == port {
			found = append(found, l.Addr.Addr().Unmap())
		}
	}
	slices.SortStableFunc(found, func(a, b netip.Addr) int { return cmp.Compare(rank(a), rank(b)) })
	var addrs []netip.AddrPort
	for _, a := range found {
		switch {
		case a.IsUnspecified() && a.Is4():
			a = netip.AddrFrom4([4]byte{127, 0, 0, 1})
		case a.IsUnspecified():
			a = netip.IPv6Loopback()
		}
		if at := netip.AddrPortFrom(a, port); !slices.Contains(addrs, at) {
			addrs = append(addrs, at)
		}
	}
	return addrs
}
