package web

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"testing"
	"time"
)

// Requests in flight are finished at a stop; what outlives the grace time is cut.
func TestStopDrains(t *testing.T) {
	f := newFixture(t, func(c *Config) { c.Grace = 2 * time.Second })
	began, finish := make(chan struct{}, 2), make(chan struct{})
	f.serve("demo", func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).Flush()
		began <- struct{}{}
		if r.URL.Path == "/never" {
			<-r.Context().Done()
			return
		}
		<-finish
		_, _ = io.WriteString(w, "done")
	})
	type result struct {
		body string
		err  error
	}
	get := func(path string, out chan<- result) {
		resp, err := f.client().Get("http://demo.helix.local" + path)
		if err != nil {
			out <- result{"", err}
			return
		}
		defer func() { _ = resp.Body.Close() }()
		body, err := io.ReadAll(resp.Body)
		out <- result{string(body), err}
	}
	good, bad := make(chan result, 1), make(chan result, 1)
	go get("/", good)
	go get("/never", bad)
	<-began
	<-began
	stopped := make(chan struct{})
	go func() { f.stop(); close(stopped) }()
	<-f.server.plain.closed
	close(finish)
	if r := <-good; r.err != nil || r.body != "done" {
		t.Errorf("request in flight: got %q, %v", r.body, r.err)
	}
	if r := <-bad; r.err == nil {
		t.Error("the endless request ended well")
	}
	<-stopped
	if len(f.server.conns) != 0 {
		t.Errorf("%d connections are left", len(f.server.conns))
	}
	if err := f.server.ServePlain(t.Context(), nopConn{}); !errors.Is(err, ErrClosed) {
		t.Errorf("got %v, want ErrClosed", err)
	}
}

func TestHandOverEndsWithItsContext(t *testing.T) {
	f := newFixture(t)
	s, err := New(f.server.cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.ServeTLS(ctx, nopConn{}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if err := (&handedConn{Conn: nopConn{}, server: s}).CloseWrite(); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("got %v", err)
	}
}

func TestSilentConnectionsDoNotHoldAStop(t *testing.T) {
	f := newFixture(t, func(c *Config) { c.Grace = 100 * time.Millisecond })
	silent := dialRaw(t, f.https) // not even a ClientHello
	c := tls.Client(dialRaw(t, f.https), &tls.Config{InsecureSkipVerify: true, ServerName: "demo.helix.local"})
	if err := c.HandshakeContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.stop()
	for _, conn := range []net.Conn{silent, c} {
		if _, err := conn.Read(make([]byte, 1)); err == nil {
			t.Error("still open")
		}
	}
}

func dialRaw(t *testing.T, addr string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}
