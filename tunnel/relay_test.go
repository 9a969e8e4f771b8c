package tunnel

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"helix.local/helix/agent/wire"
)

// throughSession returns a TCP address whose connections reach server by
// gateway, link and agent, as a client's do.
func throughSession(t testing.TB, server func(*net.TCPConn)) (address string, gw, ag *Session) {
	t.Helper()
	port := tcpServer(t, server).Port
	a, b := sockets(t, "tcp")
	gw, ag = pair(t, a, b, Limits{}, Limits{})
	serve(t, ag, dialer)
	return front(t, gw, port), gw, ag
}

func dialTCP(t testing.TB, address string) *net.TCPConn {
	t.Helper()
	c, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c.(*net.TCPConn)
}

func TestRelayHalfCloseMatrix(t *testing.T) {
	data := bytes.Repeat([]byte("some bytes "), 200000)
	sum := fmt.Sprintf("%x", sha256.Sum256(data))
	t.Run("client finishes first", func(t *testing.T) {
		address, gw, ag := throughSession(t, func(c *net.TCPConn) {
			h := sha256.New()
			_, _ = io.Copy(h, c)
			_, _ = fmt.Fprintf(c, "%x", h.Sum(nil))
		})
		c := dialTCP(t, address)
		if _, err := c.Write(data); err != nil {
			t.Fatal(err)
		}
		must(t, c.CloseWrite())
		if got := readAll(t, c); got != sum {
			t.Errorf("checksum %q", got)
		}
		eventually(t, "no streams left", func() bool { return noStreams(gw) && noStreams(ag) })
	})
	t.Run("server finishes first", func(t *testing.T) {
		sums := make(chan string, 1)
		address, _, _ := throughSession(t, func(c *net.TCPConn) {
			_, _ = io.WriteString(c, "bye")
			_ = c.CloseWrite()
			h := sha256.New()
			_, _ = io.Copy(h, c)
			sums <- fmt.Sprintf("%x", h.Sum(nil))
		})
		c := dialTCP(t, address)
		if got := readAll(t, c); got != "bye" {
			t.Errorf("read %q", got)
		}
		if _, err := c.Write(data); err != nil {
			t.Fatal(err)
		}
		must(t, c.CloseWrite())
		if got := <-sums; got != sum {
			t.Errorf("checksum %q", got)
		}
	})
	t.Run("no bytes at all", func(t *testing.T) {
		address, _, _ := throughSession(t, func(c *net.TCPConn) { _, _ = io.Copy(c, c) })
		c := dialTCP(t, address)
		must(t, c.CloseWrite())
		if got := readAll(t, c); got != "" {
			t.Errorf("read %q", got)
		}
	})
}

func TestRelayPassesResets(t *testing.T) {
	t.Run("from server", func(t *testing.T) {
		address, _, _ := throughSession(t, func(c *net.TCPConn) {
			_, _ = io.ReadFull(c, make([]byte, 4))
			_, _ = io.WriteString(c, "half an answer")
			_, _ = io.ReadFull(c, make([]byte, 1))
			_ = c.SetLinger(0)
		})
		c := dialTCP(t, address)
		write(t, c, "go!\n")
		buf := make([]byte, 14)
		if _, err := io.ReadFull(c, buf); err != nil || string(buf) != "half an answer" {
			t.Fatalf("read %q: %v", buf, err)
		}
		write(t, c, ".")
		if _, err := c.Read(buf); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("client read: %v", err)
		}
	})
	t.Run("from client", func(t *testing.T) {
		got := make(chan error, 1)
		address, gw, ag := throughSession(t, func(c *net.TCPConn) {
			_, _ = io.WriteString(c, "x")
			_, err := io.Copy(io.Discard, c)
			got <- err
		})
		c := dialTCP(t, address)
		if _, err := c.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		must(t, c.SetLinger(0), c.Close())
		if err := <-got; !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("server read: %v", err)
		}
		eventually(t, "no streams left", func() bool { return noStreams(gw) && noStreams(ag) })
	})
	t.Run("from server under load both ways", func(t *testing.T) {
		// The write of either half may be what meets the reset.
		for range 30 {
			address, _, _ := throughSession(t, func(c *net.TCPConn) {
				_, _ = io.ReadFull(c, make([]byte, 1)) // no reset before the dial is over
				go func() { _, _ = io.CopyN(io.Discard, c, 1<<20) }()
				_, _ = c.Write(make([]byte, 256<<10))
				_ = c.SetLinger(0)
			})
			c := dialTCP(t, address)
			var wg sync.WaitGroup
			var writeErr error
			wg.Go(func() { _, writeErr = c.Write(make([]byte, 32<<20)) })
			n, err := io.Copy(io.Discard, c)
			wg.Wait()
			if err == nil && !errors.Is(writeErr, syscall.ECONNRESET) {
				t.Errorf("a reset connection ended cleanly after %d bytes, write: %v", n, writeErr)
			}
			_ = c.Close()
		}
	})
	t.Run("session dies", func(t *testing.T) {
		address, _, ag := throughSession(t, func(c *net.TCPConn) {
			_, _ = io.WriteString(c, "x")
			_, _ = io.Copy(io.Discard, c)
		})
		c := dialTCP(t, address)
		if _, err := c.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		must(t, ag.Close())
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("client read: %v", err)
		}
	})
}

// A server that answers early and closes: the answer must reach a client that
// is still sending.
func TestEarlyAnswerArrives(t *testing.T) {
	address, _, _ := throughSession(t, func(c *net.TCPConn) {
		_, _ = io.ReadFull(c, make([]byte, 10))
		_, _ = io.WriteString(c, "413 too large")
	})
	for range 20 {
		c := dialTCP(t, address)
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = c.Write(make([]byte, 4<<20)) })
		buf := make([]byte, 13)
		if _, err := io.ReadFull(c, buf); err != nil || !strings.HasPrefix(string(buf), "413") {
			t.Errorf("read %q: %v", buf, err)
		}
		_ = c.Close()
		wg.Wait()
	}
}

func TestRelayEndsWithItsContext(t *testing.T) {
	a, aPeer := tcpPair(t)
	b, bPeer := tcpPair(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	done := make(chan error)
	go func() { done <- Relay(ctx, aPeer, bPeer) }()
	write(t, a, "x")
	if _, err := b.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	cancel(errors.New("workspace removed"))
	if err := <-done; err == nil || !strings.Contains(err.Error(), "workspace removed") {
		t.Error(err)
	}
	for _, c := range []net.Conn{a, b} {
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("read: %v", err)
		}
	}
}

// When a stream is reset while the client does not read, the relay must end
// all the same.
func TestRelayToAStalledClientEnds(t *testing.T) {
	j := join(t, Limits{}, Limits{})
	client, served := tcpPair(t)
	done := make(chan error)
	go func() { done <- Relay(t.Context(), served, j.gst) }()
	full := fill(j.ast)
	eventually(t, "everything full", func() bool { return j.gw.Stats().Unread > 0 })
	must(t, j.ast.Reset("gone"))
	if err := <-full; err == nil {
		t.Error("the writer was not released")
	}
	start := time.Now()
	if err := <-done; !errors.Is(err, ErrReset) {
		t.Error(err)
	}
	if took := time.Since(start); took > relayGrace+5*time.Second {
		t.Errorf("took %v", took)
	}
	if _, err := io.Copy(io.Discard, client); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("client: %v", err)
	}
}

// The shape of a long evening: connections that end in every way.
func TestTenThousandShortConnections(t *testing.T) {
	const total = 10000 / raceFactor
	address, gw, ag := throughSession(t, func(c *net.TCPConn) {
		b := make([]byte, 1)
		if _, err := io.ReadFull(c, b); err != nil {
			return
		}
		switch b[0] {
		case 'e': // answer after the end
			_, _ = io.Copy(io.Discard, c)
			_, _ = io.WriteString(c, "ok")
		case 'f': // finish first
			_, _ = io.WriteString(c, "ok")
			_ = c.CloseWrite()
			_, _ = io.Copy(io.Discard, c)
		case 'r': // reset
			_ = c.SetLinger(0)
		case 'w': // wait for the client's reset
			_, _ = io.Copy(io.Discard, c)
		}
	})
	var next, bad atomic.Int64
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			for {
				i := next.Add(1)
				if i > total {
					return
				}
				c, err := net.Dial("tcp", address)
				if err != nil {
					bad.Add(1)
					continue
				}
				kind := "efrw"[i%4]
				_, _ = c.Write([]byte{kind, 'x'})
				if kind == 'w' {
					_ = c.(*net.TCPConn).SetLinger(0)
					_ = c.Close()
					continue
				}
				if kind == 'e' {
					_ = c.(*net.TCPConn).CloseWrite()
				}
				got, err := io.ReadAll(c)
				if kind == 'r' && err == nil || kind != 'r' && (err != nil || string(got) != "ok") {
					bad.Add(1)
				}
				_ = c.Close()
			}
		})
	}
	wg.Wait()
	if bad.Load() > 0 {
		t.Errorf("%d of %d connections ended wrongly", bad.Load(), total)
	}
	eventually(t, "no streams left", func() bool { return noStreams(gw) && noStreams(ag) })
}

func TestRelayBetweenStreams(t *testing.T) {
	one, two := join(t, Limits{}, Limits{}), join(t, Limits{}, Limits{})
	done := make(chan error)
	go func() { done <- Relay(t.Context(), one.ast, two.gst) }()
	write(t, one.gst, "through two")
	must(t, one.gst.CloseWrite())
	if got := readAll(t, two.ast); got != "through two" {
		t.Errorf("read %q", got)
	}
	must(t, two.ast.Reset("no more"))
	if _, err := one.gst.Read(make([]byte, 1)); !errors.Is(err, ErrReset) {
		t.Errorf("read: %v", err)
	}
	if err := <-done; !errors.Is(err, ErrReset) {
		t.Error(err)
	}
}

func TestUnixSocketUpstream(t *testing.T) {
	a, b := sockets(t, "tcp")
	gw, ag := pair(t, a, b, Limits{}, Limits{})
	near, far := sockets(t, "unix")
	serve(t, ag, func(context.Context, wire.OpenRequest) (Conn, error) { return near.(*net.UnixConn), nil })
	st, err := gw.Open(t.Context(), wire.OpenRequest{Unix: "/run/x"})
	must(t, err)
	write(t, st, "ping")
	must(t, st.CloseWrite())
	if got := readAll(t, far); got != "ping" {
		t.Errorf("read %q", got)
	}
	write(t, far, "pong")
	must(t, far.Close())
	if got := readAll(t, st); got != "pong" {
		t.Errorf("read %q", got)
	}
}
