//go:build linux

package agent

import (
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"helix.local/helix/agent/wire"
	"helix.local/helix/tunnel"
)

// link is one try of a keeper's link: the gateway's end of it.
type links chan net.Conn

// dial makes a loopback connection and gives the gateway its end.
func (l links) dial(ctx context.Context) (net.Conn, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	defer ln.Close() //nolint:errcheck // one connection only
	ours, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		return nil, err
	}
	theirs, err := ln.Accept()
	if err != nil {
		return nil, err
	}
	select {
	case l <- theirs:
		return ours, nil
	case <-ctx.Done():
		_ = theirs.Close() // nobody serves it
		return ours, nil
	}
}

func startKeeper(t *testing.T, g *gateway, kinds ...string) links {
	t.Helper()
	k, err := newKeeper(g.boot("demo", "", ""), "test", nil, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	l := make(links)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{}, len(kinds))
	for _, kind := range kinds {
		go func() { k.keep(ctx, kind, l.dial); ended <- struct{}{} }()
	}
	t.Cleanup(func() {
		cancel()
		for range kinds {
			<-ended
		}
	})
	return l
}

func accept(t *testing.T, g *gateway, l links) (*tunnel.Session, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	conn := <-l
	t.Cleanup(func() { _ = conn.Close() }) // may be closed by its session
	s, err := g.accept(ctx, conn)
	if err == nil {
		t.Cleanup(func() { _ = s.Close() })
	}
	return s, err
}

// The token is shown once; a link that ends comes back with the key alone.
func TestPairsOnce(t *testing.T) {
	t.Parallel()
	g := newGateway(t)
	l := startKeeper(t, g, wire.LinkTCP)
	for range 3 {
		s, err := accept(t, g, l)
		if err != nil {
			t.Fatal(err)
		}
		_ = s.Close() // the link ends
	}
	if !slices.Equal(g.seen, []string{"token", "key", "key"}) {
		t.Errorf("shown: %v", g.seen)
	}
}

// Two links at once: one pairs, the other waits and then shows the key.
func TestTwoLinks(t *testing.T) {
	t.Parallel()
	g := newGateway(t)
	l := startKeeper(t, g, wire.LinkSerial, wire.LinkTCP)
	a, b := <-l, <-l
	type outcome struct {
		s   *tunnel.Session
		err error
	}
	outcomes := make(chan outcome, 2)
	for _, conn := range []net.Conn{a, b} {
		go func() {
			s, err := g.accept(t.Context(), conn)
			outcomes <- outcome{s, err}
		}()
	}
	kinds := map[string]bool{}
	for range 2 {
		o := <-outcomes
		if o.err != nil {
			t.Fatal(o.err)
		}
		kinds[o.s.Link()] = true
		t.Cleanup(func() { _ = o.s.Close() })
	}
	if len(kinds) != 2 || !slices.Equal(g.seen, []string{"token", "key"}) {
		t.Errorf("links %v, shown %v", kinds, g.seen)
	}
}

// The gateway paired us but its answer was lost: the key alone gets in.
func TestLostPairing(t *testing.T) {
	t.Parallel()
	g := newGateway(t)
	g.forget = true
	l := startKeeper(t, g, wire.LinkTCP)
	if _, err := accept(t, g, l); err == nil {
		t.Fatal("the first handshake was to break")
	}
	g.forget = false
	if _, err := accept(t, g, l); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(g.seen, []string{"token", "key"}) {
		t.Errorf("shown: %v", g.seen)
	}
}

// A handshake that broke before the gateway saw the token: the key is refused,
// and the token is shown again.
func TestBrokenBeforePairing(t *testing.T) {
	t.Parallel()
	g := newGateway(t)
	l := startKeeper(t, g, wire.LinkTCP)
	conn := <-l
	if err := wire.WriteFrame(conn, wire.Hello{Version: 1, MinVersion: 1, Nonce: make([]byte, 32), Time: time.Now()}); err != nil {
		t.Fatal(err)
	}
	if err := wire.ReadFrame(conn, new(wire.Introduction)); err != nil {
		t.Fatal(err)
	}
	_ = conn.Close() // the gateway dies here
	if _, err := accept(t, g, l); err == nil {
		t.Fatal("a key that was never paired got in")
	}
	if _, err := accept(t, g, l); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(g.seen, []string{"key", "token"}) {
		t.Errorf("shown: %v", g.seen)
	}
}

func TestBackoff(t *testing.T) {
	t.Parallel()
	var b backoff
	for i := range 20 {
		ceiling := min(firstPause<<min(i, 10), longestPause)
		if d := b.next(); d < 0 || d >= ceiling || b.ceiling != ceiling {
			t.Errorf("pause %d is %v below %v, want below %v", i, d, b.ceiling, ceiling)
		}
	}
}

func TestParseBoot(t *testing.T) {
	t.Parallel()
	g := newGateway(t)
	good := g.boot("demo", "/w", "127.88.0.1")
	good.Link = "10.188.0.1:4580"
	for name, c := range map[string]struct {
		change func(*wire.Boot)
		want   string
	}{
		"good":      {func(*wire.Boot) {}, ""},
		"version":   {func(b *wire.Boot) { b.Version = 99 }, "version 99"},
		"workspace": {func(b *wire.Boot) { b.Workspace = "a.b" }, "workspace"},
		"empty":     {func(b *wire.Boot) { b.Workspace = "" }, "workspace"},
		"target":    {func(b *wire.Boot) { b.Target = "" }, "target"},
		"token":     {func(b *wire.Boot) { b.Token = "" }, "token"},
		"key":       {func(b *wire.Boot) { b.GatewayKey = nil }, "gateway_key"},
		"dir":       {func(b *wire.Boot) { b.Dir = "w" }, "dir"},
		"address":   {func(b *wire.Boot) { b.Address = "x" }, "address"},
		"link":      {func(b *wire.Boot) { b.Link = "x" }, "link"},
	} {
		b := good
		c.change(&b)
		text, err := json.Marshal(b)
		if err != nil {
			t.Fatal(err)
		}
		_, err = ParseBoot(text)
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, text := range []string{"", `{"token":"SECRET`, `{"token":"SECRET","version":"SECRET"}`} {
		if _, err := ParseBoot([]byte(text)); err == nil || strings.Contains(err.Error(), "SECRET") {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func FuzzBoot(f *testing.F) {
	f.Add([]byte(`{"version":1,"workspace":"demo","target":"t","token":"x","gateway_key":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=","dir":"/w","link":"a:1"}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		b, err := ParseBoot(text)
		if err != nil {
			return
		}
		again, err := json.Marshal(b)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := ParseBoot(again); err != nil {
			t.Errorf("round trip: %v", err)
		}
	})
}

func TestParseStats(t *testing.T) {
	t.Parallel()
	if got := parseCPU("cpu  100 20 30 4000 500 6 7 8 9 10\ncpu0 1\n"); got != 1.71 {
		t.Errorf("cpu: %v", got)
	}
	if got := parseCPU("cpu x"); got != 0 {
		t.Errorf("cpu: %v", got)
	}
	if got := parseLoad("0.52 0.58 0.59 1/467 1234"); got != 0.52 {
		t.Errorf("load: %v", got)
	}
	if got := parseLoad(""); got != 0 {
		t.Errorf("load: %v", got)
	}
	if total, used := parseMemory("MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:  400 kB\nOdd\n"); total != 1024000 || used != 614400 {
		t.Errorf("memory: %d %d", total, used)
	}
}

func FuzzStats(f *testing.F) {
	f.Add("cpu  1 2 3 4\n", "0.5 1", "MemTotal: 10 kB\nMemAvailable: 4 kB\n")
	f.Fuzz(func(t *testing.T, cpu, load, memory string) {
		if parseCPU(cpu) < 0 {
			t.Error("negative time")
		}
		parseLoad(load)
		if total, used := parseMemory(memory); used > total {
			t.Errorf("used %d of %d", used, total)
		}
	})
}
