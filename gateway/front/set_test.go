package front

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// runSet starts a Set and stops it at the test's end.
func runSet(t *testing.T, cfg Config) (s *Set, stop func() error) {
	t.Helper()
	s = New(cfg)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	var err error
	running.Go(func() { err = s.Run(ctx) })
	stop = func() error {
		cancel()
		running.Wait()
		return err
	}
	t.Cleanup(func() { _ = stop() })
	return s, stop
}

func open(t *testing.T, s *Set, role Role) (wanted, got netip.AddrPort) {
	t.Helper()
	for {
		wanted = netip.AddrPortFrom(loopback, freePort(t))
		res, err := s.Open(t.Context(), wanted, role, 0)
		if errors.Is(err, syscall.EADDRINUSE) {
			continue // a client of some test got the port as its own
		}
		if err != nil {
			t.Fatal(err)
		}
		return wanted, res.Got
	}
}

func dial(t *testing.T, addr netip.AddrPort) *net.TCPConn {
	t.Helper()
	c, err := net.Dial("tcp", addr.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c.(*net.TCPConn)
}

func echoHandler(_ context.Context, c *net.TCPConn, _ Local) {
	_, _ = io.Copy(c, c)
	_ = c.Close()
}

func say(t *testing.T, c net.Conn, text string) {
	t.Helper()
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(text))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != text {
		t.Fatalf("got %q, %v, want %q", got, err, text)
	}
}

func TestSetKnowsWhereAConnectionCameFrom(t *testing.T) {
	type arrival struct {
		local Local
		addr  string
	}
	seen := make(chan arrival, 1)
	s := New(Config{Handle: func(_ context.Context, c *net.TCPConn, l Local) {
		seen <- arrival{l, c.LocalAddr().String()}
		_ = c.Close()
	}})
	// Opened before Run: it queues.
	before, got := open(t, s, RoleSSH)
	c := dial(t, got)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		if err := s.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	if a := <-seen; a.local != (Local{before, RoleSSH}) || a.addr != got.String() {
		t.Errorf("got %+v", a)
	}
	_ = c.Close()
	after, got := open(t, s, RolePort)
	dial(t, got)
	if a := <-seen; a.local != (Local{after, RolePort}) {
		t.Errorf("got %+v", a)
	}
	if _, err := s.Open(t.Context(), after, RolePort, 0); !errors.Is(err, ErrIsOpen) {
		t.Errorf("opened twice: %v", err)
	}
	cancel()
	running.Wait()
	if _, err := s.Open(t.Context(), after, RolePort, 0); !errors.Is(err, ErrClosed) {
		t.Errorf("opened after the end: %v", err)
	}
	if _, err := net.Dial("tcp", got.String()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("got %v, want refused", err)
	}
}

func TestSetReportsATakenPort(t *testing.T) {
	s, _ := runSet(t, Config{Handle: echoHandler})
	holder := taken(t, "127.0.0.1:0")
	if _, err := s.Open(t.Context(), holder, RoleSSH, 0); !errors.Is(err, syscall.EADDRINUSE) {
		t.Fatalf("got %v", err)
	}
	res, err := s.Open(t.Context(), holder, RoleSSH, freePort(t))
	if err != nil || !res.Fallback() {
		t.Fatalf("got %+v, %v", res, err)
	}
	say(t, dial(t, res.Got), "hello")
	if err := s.Close(holder, KeepConns); err != nil {
		t.Error(err)
	}
}

func TestClosingAListener(t *testing.T) {
	s, stop := runSet(t, Config{Handle: echoHandler})
	wanted, got := open(t, s, RolePort)
	kept := dial(t, got)
	say(t, kept, "before")
	if err := s.Close(wanted, KeepConns); err != nil {
		t.Fatal(err)
	}
	say(t, kept, "after")
	if _, err := net.Dial("tcp", got.String()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("got %v, want refused", err)
	}
	if err := s.Close(wanted, KeepConns); !errors.Is(err, ErrNotOpen) {
		t.Errorf("closed twice: %v", err)
	}
	wanted, got = open(t, s, RolePort)
	cut := dial(t, got)
	say(t, cut, "before")
	if err := s.Close(wanted, ResetConns); err != nil {
		t.Fatal(err)
	}
	if _, err := cut.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("got %v, want a reset", err)
	}
	say(t, kept, "still")
	// The end without grace takes the kept one too.
	if err := stop(); err != nil {
		t.Error(err)
	}
	if _, err := kept.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("got %v, want a reset", err)
	}
}

func TestCloseBeforeRun(t *testing.T) {
	s := New(Config{Handle: echoHandler})
	wanted, _ := open(t, s, RolePort)
	if err := s.Close(wanted, ResetConns); err != nil {
		t.Fatal(err)
	}
}

func TestGrace(t *testing.T) {
	s, stop := runSet(t, Config{Handle: echoHandler, Grace: time.Minute})
	_, got := open(t, s, RolePort)
	c := dial(t, got)
	say(t, c, "before")
	ended := make(chan error, 1)
	go func() { ended <- stop() }()
	// Run is ending when the port is closed; the connection goes on.
	for {
		again, err := net.Dial("tcp", got.String())
		if err != nil {
			break
		}
		_ = again.Close()
	}
	say(t, c, "after")
	_ = c.CloseWrite()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestOpenAndCloseUnderLoad(t *testing.T) {
	var served atomic.Int64
	s, stop := runSet(t, Config{Handle: func(ctx context.Context, c *net.TCPConn, l Local) {
		served.Add(1)
		echoHandler(ctx, c, l)
	}, Grace: 5 * time.Second})
	_, steady := open(t, s, RolePort)
	load, cancel := context.WithCancel(t.Context())
	var clients sync.WaitGroup
	for range 8 {
		clients.Go(func() {
			for load.Err() == nil {
				c, err := net.Dial("tcp", steady.String())
				if err != nil {
					t.Error(err)
					return
				}
				_, err = io.WriteString(c, "x")
				if err == nil {
					_, err = io.ReadFull(c, make([]byte, 1))
				}
				if err != nil {
					t.Error(err)
				}
				_ = Reset(c)
			}
		})
	}
	for i := range 200 {
		wanted, got := open(t, s, RolePort)
		c, err := net.Dial("tcp", got.String())
		if err != nil {
			t.Fatal(i, err)
		}
		say(t, c, "y")
		_ = c.Close()
		if err := s.Close(wanted, ResetConns); err != nil {
			t.Fatal(i, err)
		}
	}
	cancel()
	clients.Wait()
	if err := stop(); err != nil {
		t.Error(err)
	}
	if len(s.conns) != 0 || served.Load() < 200 {
		t.Errorf("%d connections left, %d served", len(s.conns), served.Load())
	}
}

// The nearest thing to "connection refused" on a socket that was accepted.
func TestRefusedTargetIsAReset(t *testing.T) {
	s, _ := runSet(t, Config{Handle: func(_ context.Context, c *net.TCPConn, _ Local) {
		if err := Reset(c); err != nil {
			t.Error(err)
		}
	}})
	_, got := open(t, s, RolePort)
	c, err := net.Dial("tcp", got.String())
	if err == nil { // otherwise the reset was faster than the client
		_, err = c.Read(make([]byte, 1))
		_ = c.Close()
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("got %v, want a reset", err)
	}
}

func TestPeekedConn(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	client := dial(t, netip.MustParseAddrPort(ln.Addr().String()))
	accepted, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	c := &peeked{accepted, []byte("head ")}
	_, _ = io.WriteString(client, "tail")
	_ = client.CloseWrite()
	var got bytes.Buffer
	if _, err := io.Copy(&got, c); err != nil || got.String() != "head tail" {
		t.Errorf("got %q, %v", got.String(), err)
	}
	if _, err := io.Copy(c, bytes.NewReader([]byte("answer"))); err != nil {
		t.Error(err)
	}
	if err := c.CloseWrite(); err != nil {
		t.Error(err)
	}
	if answer, err := io.ReadAll(client); err != nil || string(answer) != "answer" {
		t.Errorf("got %q, %v", answer, err)
	}
	if err := Reset(c); err != nil {
		t.Error(err)
	}
	// What is no TCP connection is closed as well as it can be.
	a, b := net.Pipe()
	defer func() { _ = b.Close() }()
	p := &peeked{a, nil}
	if err := errors.Join(p.SetLinger(0), p.CloseWrite()); err != nil {
		t.Error(err)
	}
	if _, err := b.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("got %v", err)
	}
}
