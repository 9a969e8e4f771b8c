package dnsd

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// patience bounds every wait of these tests; only a failing one uses it up.
const patience = 20 * time.Second

func send(t testing.TB, c net.Conn, parts ...[]byte) {
	t.Helper()
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write(slices.Concat(parts...)); err != nil {
		t.Fatal(err)
	}
}

// framed is msg as it goes over TCP.
func framed(msg []byte) []byte {
	return append(binary.BigEndian.AppendUint16(nil, uint16(len(msg))), msg...)
}

func readFramed(t testing.TB, c net.Conn) *dns.Msg {
	t.Helper()
	var size [2]byte
	if _, err := io.ReadFull(c, size[:]); err != nil {
		t.Fatal(err)
	}
	data := make([]byte, binary.BigEndian.Uint16(size[:]))
	if _, err := io.ReadFull(c, data); err != nil {
		t.Fatal(err)
	}
	return unpack(t, data)
}

// closedBy reports whether the other side ends c.
func closedBy(t testing.TB, c net.Conn) bool {
	t.Helper()
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	n, err := c.Read(make([]byte, 1))
	var timeout net.Error
	return n == 0 && err != nil && (!errors.As(err, &timeout) || !timeout.Timeout())
}

// TestAddressesTogether: A and AAAA asked at once from one socket are both
// answered soon, and what is dropped holds nobody up.
func TestAddressesTogether(t *testing.T) {
	c := dial(t, "udp", serve(t, newServer(t)))
	in := make([]byte, 4096)
	var took []time.Duration
	for range 21 {
		start := time.Now()
		send(t, c, []byte("noise"))
		send(t, c, question(t, "demo.helix.local.", dns.TypeA))
		send(t, c, question(t, "demo.helix.local.", dns.TypeAAAA))
		for _, want := range []int{1, 0} {
			n, err := c.Read(in)
			if err != nil {
				t.Fatal(err)
			}
			if m := unpack(t, in[:n]); len(m.Answer) != want || len(m.Ns) != 1-want || m.Rcode != dns.RcodeSuccess {
				t.Errorf("got %v", m)
			}
		}
		took = append(took, time.Since(start))
	}
	if slices.Sort(took); took[len(took)/2] > 50*time.Millisecond { // the median: the machine may be busy for a moment
		t.Errorf("took %v", took)
	}
}

func TestTCPPipelined(t *testing.T) {
	c := dial(t, "tcp", serve(t, newServer(t)))
	var all []byte
	for i := range 100 {
		q := question(t, "demo.helix.local.", dns.TypeA)
		binary.BigEndian.PutUint16(q, uint16(i))
		all = append(all, framed(q)...)
	}
	send(t, c, all)
	for i := range 100 {
		if m := readFramed(t, c); int(m.Id) != i || len(m.Answer) != 1 {
			t.Fatalf("answer %d: %v", i, m)
		}
	}
	// In pieces, one byte a write, and the largest message there is.
	for _, b := range framed(question(t, "gw.helix.local.", dns.TypeA)) {
		send(t, c, []byte{b})
	}
	if m := readFramed(t, c); len(m.Answer) != 1 {
		t.Errorf("in pieces: %v", m)
	}
	send(t, c, framed(append(question(t, "gw.helix.local.", dns.TypeA), make([]byte, 65000)...)))
	if m := readFramed(t, c); len(m.Answer) != 1 {
		t.Errorf("large: %v", m)
	}
	send(t, c, framed([]byte("tiny")))
	if !closedBy(t, c) {
		t.Error("not closed after noise")
	}
}

// TestTCPHostile: clients that hold connections, trickle bytes or never read are
// cut off, and those who ask are answered meanwhile.
func TestTCPHostile(t *testing.T) {
	s := newServer(t)
	s.limits = limits{conns: 8, read: time.Second / 2, write: time.Second / 2, retry: time.Millisecond}
	addr := serve(t, s)
	q := framed(question(t, "demo.helix.local.", dns.TypeA))

	deaf := dial(t, "tcp", addr) // asks for ever and reads nothing
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			if _, err := deaf.Write(bytes.Repeat(q, 100)); err != nil {
				return
			}
		}
	}()
	trickle := dial(t, "tcp", addr)
	send(t, trickle, q[:5]) // and never the rest

	asker := dial(t, "tcp", addr)
	var idle []net.Conn
	for range 3 * s.limits.conns {
		idle = append(idle, dial(t, "tcp", addr))
		send(t, asker, q) // stays among the latest
		if m := readFramed(t, asker); len(m.Answer) != 1 {
			t.Fatalf("got %v", m)
		}
	}
	for i, c := range append(idle, trickle) {
		if !closedBy(t, c) {
			t.Errorf("silent connection %d stays", i)
		}
	}
	<-ended
	if !closedBy(t, asker) {
		t.Error("the asker stays after it fell silent")
	}
}

func TestServeEnds(t *testing.T) {
	listen := func() (net.PacketConn, net.Listener) {
		var lc net.ListenConfig
		udp, err := lc.ListenPacket(t.Context(), "udp", "127.0.0.1:0")
		tcp, err2 := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
		if err := errors.Join(err, err2); err != nil {
			t.Fatal(err)
		}
		return udp, tcp
	}
	s := newServer(t)
	t.Run("with ctx, also while somebody is connected", func(t *testing.T) {
		udp, tcp := listen()
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- s.Serve(ctx, udp, tcp) }()
		c := dial(t, "tcp", tcp.Addr().String())
		send(t, c, framed(question(t, "demo.helix.local.", dns.TypeA)))
		readFramed(t, c)
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if !closedBy(t, c) {
			t.Error("connection stays")
		}
	})
	t.Run("udp socket closed by somebody", func(t *testing.T) {
		udp, tcp := listen()
		_ = udp.Close()
		if err := s.Serve(t.Context(), udp, tcp); !errors.Is(err, net.ErrClosed) {
			t.Errorf("got %v", err)
		}
		if _, err := tcp.Accept(); !errors.Is(err, net.ErrClosed) {
			t.Errorf("the listener is left open: %v", err)
		}
	})
	t.Run("tcp listener closed by somebody", func(t *testing.T) {
		udp, tcp := listen()
		_ = tcp.Close()
		if err := s.Serve(t.Context(), udp, tcp); !errors.Is(err, net.ErrClosed) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("udp alone, of another make, that fails", func(t *testing.T) {
		udp, tcp := listen()
		_ = tcp.Close()
		if err := s.Serve(t.Context(), failing{PacketConn: udp}, nil); err == nil {
			t.Error("no error from a socket that only fails")
		}
	})
}

// TestStopIsNoError: the end of ctx is never taken for a listener that somebody
// else closed.
func TestStopIsNoError(t *testing.T) {
	s := newServer(t)
	for range 300 {
		var lc net.ListenConfig
		tcp, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- s.Serve(ctx, nil, tcp) }()
		c := dial(t, "tcp", tcp.Addr().String())
		send(t, c, framed(question(t, "demo.helix.local.", dns.TypeA)))
		readFramed(t, c)
		cancel()
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
	}
}

// failing is a socket of another type whose reads fail.
type failing struct{ net.PacketConn }

func (failing) ReadFrom([]byte) (int, net.Addr, error) { return 0, nil, errors.New("no") }

// TestOtherSocket: a net.PacketConn that is no *net.UDPConn serves as well.
func TestOtherSocket(t *testing.T) {
	var lc net.ListenConfig
	udp, err := lc.ListenPacket(t.Context(), "udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	s := newServer(t)
	go func() { ended <- s.Serve(ctx, struct{ net.PacketConn }{udp}, nil) }()
	c := dial(t, "udp", udp.LocalAddr().String())
	send(t, c, question(t, "demo.helix.local.", dns.TypeA))
	in := make([]byte, 512)
	if n, err := c.Read(in); err != nil || len(unpack(t, in[:n]).Answer) != 1 {
		t.Errorf("no answer: %v", err)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// history is a set of names that change under the questions. Every change is
// kept, so that an answer can be held against what was true while it was on the
// way.
type history struct {
	mu      sync.Mutex
	changes [][]netip.Addr // by name: its addresses in turn, the zero one for none
}

func (h *history) lookup(host string) (Answer, bool) {
	var i int
	if _, err := fmt.Sscanf(host, "w%d", &i); err != nil {
		return Answer{}, false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	a := h.changes[i][len(h.changes[i])-1]
	return Answer{A: a}, a.IsValid()
}

func (h *history) change(i int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	var next netip.Addr
	if was := h.changes[i]; !was[len(was)-1].IsValid() {
		next = netip.AddrFrom4([4]byte{127, 88, byte(i), byte(len(was))})
	}
	h.changes[i] = append(h.changes[i], next)
}

func (h *history) len(i int) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.changes[i])
}

// since returns what was true of name i at or after its n-th change.
func (h *history) since(i, n int) []netip.Addr {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.changes[i][n-1:])
}

// TestChangingNames asks 50,000 questions while names come and go: no answer
// tells what was not true between question and answer.
func TestChangingNames(t *testing.T) {
	const names, questions, askers = 20, 50_000, 4
	h := &history{changes: make([][]netip.Addr, names)}
	for i := range h.changes {
		h.changes[i] = []netip.Addr{{}}
	}
	s, err := New(Config{Zones: []string{"helix.local"}, Lookup: h.lookup})
	if err != nil {
		t.Fatal(err)
	}
	addr := serve(t, s)
	var all sync.WaitGroup
	for range askers {
		c := dial(t, "udp", addr)
		all.Go(func() {
			in := make([]byte, 512)
			for n := range questions / askers {
				i := rand.IntN(names)
				if n%7 == 0 {
					h.change(i)
				}
				before := h.len(i)
				send(t, c, question(t, fmt.Sprintf("w%d.helix.local.", i), dns.TypeA))
				got, err := c.Read(in)
				if err != nil {
					t.Error(err)
					return
				}
				m := unpack(t, in[:got])
				var told netip.Addr
				if len(m.Answer) == 1 {
					told, _ = netip.AddrFromSlice(m.Answer[0].(*dns.A).A.To4())
				}
				if wrong := m.Rcode == dns.RcodeSuccess != told.IsValid(); wrong || !slices.Contains(h.since(i, before), told) {
					t.Errorf("w%d: told %v, true were %v\n%v", i, told, h.since(i, before), m)
					return
				}
			}
		})
	}
	all.Wait()
}
