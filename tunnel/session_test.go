package tunnel

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"helix.local/helix/agent/wire"
)

func TestOpenSaysWhyNot(t *testing.T) {
	a, b := sockets(t, "tcp")
	gw, ag := pair(t, a, b, Limits{}, Limits{})
	answers := map[string]error{
		"refused": ErrRefused, "timeout": ErrTimeout, "none": ErrNoService, "denied": ErrDenied,
		"draining": ErrDraining, "late": context.DeadlineExceeded, "gone": os.ErrNotExist, "no": os.ErrPermission,
		"odd": errors.New("odd\x1b[31m fault"), "own": &OpenError{Status: wire.StatusDenied, Message: "by policy"},
	}
	serve(t, ag, func(_ context.Context, r wire.OpenRequest) (Conn, error) {
		return nil, answers[r.Service]
	})
	for name, want := range map[string]struct {
		err    error
		status wire.Status
		text   string
	}{
		"refused": {ErrRefused, wire.StatusRefused, ""}, "timeout": {ErrTimeout, wire.StatusTimeout, ""},
		"none": {ErrNoService, wire.StatusNoService, ""}, "denied": {ErrDenied, wire.StatusDenied, ""},
		"draining": {ErrDraining, wire.StatusDraining, ""}, "late": {ErrTimeout, wire.StatusTimeout, ""},
		"gone": {ErrRefused, wire.StatusRefused, ""}, "no": {ErrDenied, wire.StatusDenied, ""},
		"odd": {nil, wire.StatusFailed, "odd [31m fault"}, "own": {ErrDenied, wire.StatusDenied, "by policy"},
		"nothing returned": {nil, wire.StatusFailed, "no upstream"},
	} {
		_, err := gw.Open(t.Context(), wire.OpenRequest{Service: name})
		var open *OpenError
		if !errors.As(err, &open) || open.Status != want.status {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if want.err != nil && !errors.Is(err, want.err) {
			t.Errorf("%s: %v is not %v", name, err, want.err)
		}
		if !strings.Contains(err.Error(), want.text) || strings.ContainsRune(err.Error(), '\x1b') {
			t.Errorf("%s: text %q", name, err)
		}
		if (open.Hint() != "") != (open.Status == wire.StatusRefused || open.Status == wire.StatusDraining) {
			t.Errorf("%s: hint %q", name, open.Hint())
		}
	}
	for _, r := range []wire.OpenRequest{{}, {Service: "a", Port: 1}, {Port: 1, Unix: "/x"}} {
		if _, err := gw.Open(t.Context(), r); err == nil || !strings.Contains(err.Error(), "one service, port or socket") {
			t.Errorf("%+v: %v", r, err)
		}
	}
	eventually(t, "no streams left", func() bool { return noStreams(gw) && noStreams(ag) })
}

func TestOpenOfAClosedPort(t *testing.T) {
	a, b := sockets(t, "tcp")
	gw, ag := pair(t, a, b, Limits{}, Limits{})
	serve(t, ag, dialer)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err, ln.Close())
	if _, err := gw.Open(t.Context(), wire.OpenRequest{Port: uint16(ln.Addr().(*net.TCPAddr).Port)}); !errors.Is(err, ErrRefused) {
		t.Error(err)
	}
}

func TestOpenGivenUpEndsTheDial(t *testing.T) {
	a, b := sockets(t, "tcp")
	gw, ag := pair(t, a, b, Limits{}, Limits{})
	dialing, ended := make(chan struct{}), make(chan struct{})
	serve(t, ag, func(ctx context.Context, _ wire.OpenRequest) (Conn, error) {
		close(dialing)
		<-ctx.Done()
		close(ended)
		return nil, ctx.Err()
	})
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-dialing
		cancel()
	}()
	if _, err := gw.Open(ctx, wire.OpenRequest{Port: 1}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	<-ended
	eventually(t, "no streams left", func() bool { return noStreams(gw) && noStreams(ag) })
}

// With nobody accepting, opens beyond the backlog block inside yamux: their
// contexts must still end them, and the session must work afterwards.
func TestOpenGivenUpInsideYamux(t *testing.T) {
	a, b := sockets(t, "tcp")
	gw, ag := pair(t, a, b, Limits{}, Limits{})
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	var bad atomic.Int64
	for range backlog + 200 {
		wg.Go(func() {
			if _, err := gw.Open(ctx, wire.OpenRequest{Port: 1}); !errors.Is(err, context.Canceled) {
				bad.Add(1)
			}
		})
	}
	eventually(t, "backlog full", func() bool { return ag.Stats().Streams == backlog })
	cancel()
	wg.Wait()
	if bad.Load() > 0 {
		t.Errorf("%d opens did not end with their context", bad.Load())
	}
	serve(t, ag, func(context.Context, wire.OpenRequest) (Conn, error) {
		return Local(func(context.Context, *Stream) {}), nil
	})
	eventually(t, "no streams left", func() bool { return noStreams(gw) && noStreams(ag) })
	st, err := gw.Open(t.Context(), wire.OpenRequest{Port: 1})
	must(t, err, st.Close())
}

func TestTenThousandOpensAtOnce(t *testing.T) {
	a, b := sockets(t, "tcp")
	gw, ag := pair(t, a, b, Limits{}, Limits{})
	release := make(chan struct{})
	serve(t, ag, func(ctx context.Context, r wire.OpenRequest) (Conn, error) {
		if r.Port == 1 { // one dial that never ends by itself
			<-ctx.Done()
			return nil, ctx.Err()
		}
		return Local(func(context.Context, *Stream) { <-release }), nil
	})
	slow, stop := context.WithCancel(t.Context())
	defer stop()
	var wg sync.WaitGroup
	wg.Go(func() { _, _ = gw.Open(slow, wire.OpenRequest{Port: 1}) })
	start := time.Now()
	var opens sync.WaitGroup
	var failed atomic.Int64
	const total = 10000 / raceFactor
	for range total {
		opens.Go(func() {
			st, err := gw.Open(t.Context(), wire.OpenRequest{Port: 2})
			if err != nil {
				failed.Add(1)
				return
			}
			wg.Go(func() {
				_, _ = io.Copy(io.Discard, st)
				_ = st.Close()
			})
		})
	}
	opens.Wait()
	took := time.Since(start)
	t.Logf("%d opens at once: %v", total, took)
	if failed.Load() > 0 || gw.Stats().Streams < total {
		t.Errorf("%d failed, %d open", failed.Load(), gw.Stats().Streams)
	}
	if took > 5*time.Second {
		t.Errorf("took %v, want at most 5 s", took)
	}
	close(release)
	stop()
	wg.Wait()
	eventually(t, "no streams left", func() bool { return noStreams(gw) && noStreams(ag) })
}

func TestTooManyStreams(t *testing.T) {
	j := join(t, Limits{MaxStreams: 2}, Limits{})
	j.open(t)
	if _, err := j.gw.Open(t.Context(), wire.OpenRequest{Service: "x"}); !errors.Is(err, ErrTooManyStreams) {
		t.Error(err)
	}
	a, b := sockets(t, "tcp")
	k := joinOver(t, a, b, Limits{}, Limits{MaxStreams: 1})
	if _, err := k.gw.Open(t.Context(), wire.OpenRequest{Service: "x"}); err == nil || !strings.Contains(err.Error(), "too many") {
		t.Error(err)
	}
}

func TestDeathNeverLooksLikeAnEnd(t *testing.T) {
	deaths := map[string]func(j joined, gw, ag net.Conn) error{
		"agent closes in order":   func(j joined, _, _ net.Conn) error { return j.ag.Close() },
		"gateway closes in order": func(j joined, _, _ net.Conn) error { return j.gw.Close() },
		"link is cut":             func(_ joined, _, ag net.Conn) error { return ag.Close() },
		"link is reset": func(_ joined, _, ag net.Conn) error {
			return errors.Join(ag.(*net.TCPConn).SetLinger(0), ag.Close())
		},
		"agent sends rubbish": func(_ joined, _, ag net.Conn) error { return second(ag.Write([]byte("rubbish, not a frame"))) },
	}
	for name, kill := range deaths {
		t.Run(name, func(t *testing.T) {
			a, b := sockets(t, "tcp")
			j := joinOver(t, a, b, Limits{}, Limits{})
			ended, endedPeer := j.open(t)
			write(t, endedPeer, "whole")
			must(t, endedPeer.CloseWrite())
			write(t, j.ast, "part")
			eventually(t, "bytes arrived", func() bool { return j.gw.Stats().Unread == 9 })
			blocked := make(chan error, 3)
			_, silent := j.open(t)
			go func() { blocked <- second(silent.Read(make([]byte, 1))) }()
			go func() { blocked <- <-fill(j.gst) }()
			go func() { blocked <- j.gw.Drain(t.Context(), "") }()
			eventually(t, "a full window", func() bool { return full(j.ag.Stats().Unread) })
			must(t, kill(j, a, b))
			for range 3 {
				if err := <-blocked; !errors.Is(err, ErrClosed) {
					t.Errorf("blocked call: %v", err)
				}
			}
			got, err := io.ReadAll(j.gst)
			if !errors.Is(err, ErrClosed) || string(got) != "part" {
				t.Errorf("read %q: %v", got, err)
			}
			if got := readAll(t, ended); got != "whole" {
				t.Errorf("a finished stream gave %q", got)
			}
			for _, s := range []*Session{j.gw, j.ag} {
				<-s.Done()
				if !errors.Is(s.Err(), ErrClosed) {
					t.Errorf("session error: %v", s.Err())
				}
				if _, err := s.Ping(t.Context()); !errors.Is(err, ErrClosed) {
					t.Errorf("ping: %v", err)
				}
			}
			if _, err := j.gw.Open(t.Context(), wire.OpenRequest{Port: 1}); !errors.Is(err, ErrClosed) {
				t.Errorf("open: %v", err)
			}
			must(t, j.gst.Close(), j.gst.Reset("late"), j.gw.Close())
		})
	}
}

func TestByeTellsTheReason(t *testing.T) {
	j := join(t, Limits{}, Limits{})
	must(t, j.ag.Close())
	<-j.gw.Done()
	if err := j.gw.Err(); !strings.Contains(err.Error(), "bye: closed by the agent") {
		t.Error(err)
	}
}

func TestDrain(t *testing.T) {
	for _, who := range []string{"gateway", "agent"} {
		t.Run(who, func(t *testing.T) {
			j := join(t, Limits{}, Limits{})
			s := j.gw
			if who == "agent" {
				s = j.ag
			}
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			if err := s.Drain(ctx, "update"); !errors.Is(err, context.Canceled) {
				t.Errorf("drain with a stream open: %v", err)
			}
			if _, err := j.gw.Open(t.Context(), wire.OpenRequest{Service: "x"}); !errors.Is(err, ErrDraining) {
				t.Errorf("open: %v", err)
			}
			write(t, j.gst, "still works")
			must(t, j.gst.CloseWrite(), j.ast.CloseWrite())
			if got := readAll(t, j.ast); got != "still works" {
				t.Errorf("read %q", got)
			}
			_ = readAll(t, j.gst)
			must(t, s.Drain(t.Context(), "update"))
		})
	}
}

func TestPingAndFacts(t *testing.T) {
	j := join(t, Limits{}, Limits{})
	for _, s := range []*Session{j.gw, j.ag} {
		rtt, err := s.Ping(t.Context())
		if err != nil || rtt <= 0 || s.Stats().RTT != rtt {
			t.Errorf("ping %v: %v", rtt, err)
		}
		if s.Epoch() != 7 || s.Name() != "s" || s.Link() != wire.LinkTCP || s.Intro().Target != "target" || s.Err() != nil {
			t.Errorf("epoch %d, name %q, link %q, intro %+v", s.Epoch(), s.Name(), s.Link(), s.Intro())
		}
		if off := time.Since(s.GatewayTime()).Abs(); off > time.Minute {
			t.Errorf("gateway's time is %v off", off)
		}
		if st := s.Stats(); st.Opened != 1 || st.BytesIn == 0 || st.BytesOut == 0 || st.LastHeard < 0 {
			t.Errorf("stats %+v", st)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := j.gw.Ping(ctx); err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if _, err := j.ag.Open(t.Context(), wire.OpenRequest{Port: 1}); !errors.Is(err, ErrDenied) {
		t.Errorf("agent opens: %v", err)
	}
	if err := j.gw.Serve(t.Context(), nil); !errors.Is(err, ErrDenied) {
		t.Errorf("gateway serves: %v", err)
	}
}

// Two sessions of one agent live side by side; the end of one is nothing to the
// other.
func TestTwoSessions(t *testing.T) {
	one, two := join(t, Limits{}, Limits{}), join(t, Limits{}, Limits{})
	must(t, one.gw.Close())
	write(t, two.gst, "here")
	must(t, two.gst.CloseWrite())
	if got := readAll(t, two.ast); got != "here" {
		t.Errorf("read %q", got)
	}
}
