package tunnel

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"helix.local/helix/agent/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newKey(t testing.TB) ed25519.PrivateKey {
	t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// sockets returns the two ends of one real connection.
func sockets(t testing.TB, network string) (a, b net.Conn) {
	t.Helper()
	address := "127.0.0.1:0"
	if network == "unix" {
		address = filepath.Join(t.TempDir(), "s")
	}
	ln, err := net.Listen(network, address)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	if a, err = net.Dial(network, ln.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if b, err = ln.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = a.Close()
		_ = b.Close()
	})
	return a, b
}

func tcpPair(t testing.TB) (a, b *net.TCPConn) {
	t.Helper()
	x, y := sockets(t, "tcp")
	return x.(*net.TCPConn), y.(*net.TCPConn)
}

func accept(epoch uint64) Offer {
	return func(context.Context, wire.Hello, wire.Introduction) (wire.Welcome, error) {
		return wire.Welcome{Session: "s", Epoch: epoch}, nil
	}
}

// pair makes both ends of a session over the two ends of a connection.
func pair(t testing.TB, gw, ag net.Conn, gl, al Limits) (gateway, agent *Session) {
	t.Helper()
	key := newKey(t)
	type result struct {
		s   *Session
		err error
	}
	got := make(chan result, 1)
	go func() {
		s, err := Connect(context.Background(), ag, AgentConfig{
			Target: "target", Link: wire.LinkTCP, Key: newKey(t), GatewayKey: key.Public().(ed25519.PublicKey), Limits: al,
		})
		got <- result{s, err}
	}()
	gateway, err := Accept(t.Context(), gw, GatewayConfig{Key: key, Offer: accept(7), Limits: gl})
	r := <-got
	if err := errors.Join(err, r.err); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = gateway.Close()
		_ = r.s.Close()
	})
	return gateway, r.s
}

// serve runs s.Serve until the test ends.
func serve(t testing.TB, s *Session, h Handler) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, h) }()
	t.Cleanup(func() {
		cancel()
		<-done
	})
}

// handed is a handler that gives each stream of the agent to the test, until
// release is closed.
func handed(streams chan<- *Stream, release <-chan struct{}) Handler {
	return func(context.Context, wire.OpenRequest) (Conn, error) {
		return Local(func(_ context.Context, st *Stream) {
			streams <- st
			<-release
		}), nil
	}
}

// joined is a session over a loopback connection with one stream open, seen
// from both ends.
type joined struct {
	gw, ag   *Session
	gst, ast *Stream
	streams  chan *Stream
}

func join(t testing.TB, gl, al Limits) joined {
	t.Helper()
	a, b := sockets(t, "tcp")
	return joinOver(t, a, b, gl, al)
}

func joinOver(t testing.TB, a, b net.Conn, gl, al Limits) joined {
	t.Helper()
	j := joined{streams: make(chan *Stream, 64)}
	j.gw, j.ag = pair(t, a, b, gl, al)
	release := make(chan struct{})
	serve(t, j.ag, handed(j.streams, release))
	t.Cleanup(func() { close(release) })
	j.gst, j.ast = j.open(t)
	return j
}

func (j joined) open(t testing.TB) (gst, ast *Stream) {
	t.Helper()
	gst, err := j.gw.Open(t.Context(), wire.OpenRequest{Service: "x"})
	if err != nil {
		t.Fatal(err)
	}
	return gst, <-j.streams
}

// eventually waits for a state that has no event of its own, such as another
// program's accounting; yield-ing, not sleeping.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(20 * time.Second)
	for !ok() {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("not within 20 s: %s", what)
		}
	}
}

// echoServer is a TCP server that runs f on each connection.
func tcpServer(t testing.TB, f func(*net.TCPConn)) *net.TCPAddr {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				f(c.(*net.TCPConn))
				_ = c.Close()
			})
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		wg.Wait()
	})
	return ln.Addr().(*net.TCPAddr)
}

// dialer is a handler that dials the port asked on loopback.
func dialer(ctx context.Context, req wire.OpenRequest) (Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", fmt.Sprintf("127.0.0.1:%d", req.Port))
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}

// front is the gateway's way in: a TCP listener whose connections are relayed
// to port through s.
func front(t testing.TB, s *Session, port int) string {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	addr := tcpServer(t, func(c *net.TCPConn) {
		st, err := s.Open(ctx, wire.OpenRequest{Port: uint16(port)})
		if err != nil {
			abort(c, "not opened")
			return
		}
		_ = Relay(ctx, c, st)
	})
	t.Cleanup(cancel)
	return addr.String()
}

func readAll(t testing.TB, r io.Reader) string {
	t.Helper()
	b, err := io.ReadAll(r)
	if err != nil {
		t.Fatalf("read %d bytes: %v", len(b), err)
	}
	return string(b)
}

func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func write(t testing.TB, w io.Writer, s string) {
	t.Helper()
	if _, err := io.WriteString(w, s); err != nil {
		t.Fatal(err)
	}
}
