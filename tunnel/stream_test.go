package tunnel

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"helix.local/helix/agent/wire"
)

func TestHalfCloseEitherWay(t *testing.T) {
	j := join(t, Limits{}, Limits{})
	for name, ends := range map[string][2]*Stream{"gateway first": {j.gst, j.ast}, "agent first": nil2(j.open(t))} {
		first, second := ends[0], ends[1]
		if name == "agent first" {
			first, second = second, first
		}
		write(t, first, "question")
		must(t, first.CloseWrite(), first.CloseWrite())
		if got := readAll(t, second); got != "question" {
			t.Errorf("%s: read %q", name, got)
		}
		write(t, second, "answer after the end")
		must(t, second.CloseWrite())
		if got := readAll(t, first); got != "answer after the end" {
			t.Errorf("%s: read %q", name, got)
		}
		if _, err := first.Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
			t.Errorf("%s: write after CloseWrite: %v", name, err)
		}
	}
	eventually(t, "no streams left", func() bool { return noStreams(j.gw) && noStreams(j.ag) })
}

func nil2(a, b *Stream) [2]*Stream { return [2]*Stream{a, b} }

func noStreams(s *Session) bool {
	st := s.Stats()
	return st.Streams == 0 && st.Unread == 0 && s.mux.NumStreams() == 1
}

func TestZeroBytesBothWays(t *testing.T) {
	j := join(t, Limits{}, Limits{})
	must(t, j.gst.CloseWrite(), j.ast.CloseWrite())
	if a, b := readAll(t, j.gst), readAll(t, j.ast); a+b != "" {
		t.Errorf("read %q and %q", a, b)
	}
}

func TestBulkBothWaysAtOnce(t *testing.T) {
	j := join(t, Limits{}, Limits{})
	data := bytes.Repeat([]byte("0123456789abcdef"), 1<<19) // 8 MiB
	var wg sync.WaitGroup
	for _, ends := range [][2]*Stream{{j.gst, j.ast}, {j.ast, j.gst}} {
		wg.Go(func() {
			if _, err := ends[0].Write(data); err != nil {
				t.Error(err)
			}
			if err := ends[0].CloseWrite(); err != nil {
				t.Error(err)
			}
		})
		wg.Go(func() {
			if got, err := io.ReadAll(ends[1]); err != nil || !bytes.Equal(got, data) {
				t.Errorf("read %d bytes, equal %v: %v", len(got), bytes.Equal(got, data), err)
			}
		})
	}
	wg.Wait()
}

// fill writes until the window is full, and returns what ends the Write.
func fill(st *Stream) <-chan error {
	ended := make(chan error, 1)
	go func() {
		_, err := st.Write(make([]byte, 8<<20))
		ended <- err
	}()
	return ended
}

// full reports a full window: the frames of the opening took a few bytes of it.
func full(n int) bool { return n <= 1<<20 && n > 1<<20-256 }

func TestResetAbortsBothEndsWithAFullWindow(t *testing.T) {
	for _, from := range []string{"gateway", "agent", "both"} {
		t.Run(from, func(t *testing.T) {
			j := join(t, Limits{}, Limits{})
			g, a := fill(j.gst), fill(j.ast)
			eventually(t, "both windows full", func() bool {
				return full(j.gw.Stats().Unread) && full(j.ag.Stats().Unread)
			})
			if from != "agent" {
				must(t, j.gst.Reset("enough"), j.gst.Reset("enough"))
			}
			if from != "gateway" {
				must(t, j.ast.Reset("enough"))
			}
			for end, ended := range map[string]<-chan error{"gateway": g, "agent": a} {
				if err := <-ended; !errors.Is(err, ErrReset) {
					t.Errorf("write at the %s: %v", end, err)
				}
			}
			for end, st := range map[string]*Stream{"gateway": j.gst, "agent": j.ast} {
				n, err := io.Copy(io.Discard, st)
				if !errors.Is(err, ErrReset) {
					t.Errorf("read at the %s: %d bytes, %v", end, n, err)
				}
				if end != from && from != "both" && !full(int(n)) {
					t.Errorf("read at the %s: %d bytes of what came before", end, n)
				}
			}
			eventually(t, "no streams left", func() bool { return noStreams(j.gw) && noStreams(j.ag) })
			j.open(t) // the session lives
		})
	}
}

func TestResetWakesAReader(t *testing.T) {
	j := join(t, Limits{}, Limits{})
	got := make(chan error, 2)
	for _, st := range []*Stream{j.gst, j.ast} {
		go func() {
			_, err := st.Read(make([]byte, 1))
			got <- err
		}()
	}
	must(t, j.ast.Reset("because"))
	for range 2 {
		if err := <-got; !errors.Is(err, ErrReset) || !strings.Contains(err.Error(), "because") {
			t.Error(err)
		}
	}
}

func TestResetAfterAnEndIsNoCleanEnd(t *testing.T) {
	j := join(t, Limits{}, Limits{})
	write(t, j.gst, "part")
	must(t, j.gst.Reset("cut"))
	b, err := io.ReadAll(j.ast)
	if !errors.Is(err, ErrReset) || (string(b) != "part" && string(b) != "") {
		t.Errorf("read %q: %v", b, err)
	}
}

func TestCloseLetsThePeerReadAndEndsItsWrites(t *testing.T) {
	j := join(t, Limits{}, Limits{})
	blocked := fill(j.ast)
	eventually(t, "window full", func() bool { return full(j.gw.Stats().Unread) })
	write(t, j.gst, "last words")
	must(t, j.gst.Close(), j.gst.Close())
	if err := <-blocked; !errors.Is(err, ErrReset) {
		t.Errorf("peer's write: %v", err)
	}
	if got := readAll(t, j.ast); got != "last words" {
		t.Errorf("peer read %q", got)
	}
	if _, err := j.ast.Write([]byte("x")); !errors.Is(err, ErrReset) {
		t.Errorf("peer's later write: %v", err)
	}
	for what, err := range map[string]error{
		"read": second(j.gst.Read(make([]byte, 1))), "write": second(j.gst.Write([]byte("x"))),
		"deadline": j.gst.SetDeadline(time.Now()),
	} {
		if !errors.Is(err, net.ErrClosed) {
			t.Errorf("%s after Close: %v", what, err)
		}
	}
	eventually(t, "no streams left", func() bool { return noStreams(j.gw) && noStreams(j.ag) })
}

func second(_ int, err error) error { return err }

func TestDeadlines(t *testing.T) {
	j := join(t, Limits{}, Limits{})
	must(t, j.gst.SetReadDeadline(time.Now().Add(10*time.Millisecond)))
	if _, err := j.gst.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read: %v", err)
	}
	must(t, j.gst.SetWriteDeadline(time.Now().Add(10*time.Millisecond)))
	n, err := j.gst.Write(make([]byte, 4<<20))
	if !errors.Is(err, os.ErrDeadlineExceeded) || n > 1<<20 {
		t.Errorf("write %d bytes: %v", n, err)
	}
	var timeout net.Error
	if !errors.As(err, &timeout) || !timeout.Timeout() {
		t.Errorf("write: %v is no time-out", err)
	}
	write(t, j.ast, "late")
	must(t, j.gst.SetDeadline(time.Now().Add(-time.Second)))
	if _, err := j.gst.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read with a past deadline: %v", err)
	}
	if _, err := j.gst.Write([]byte("x")); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("write with a past deadline: %v", err)
	}
	must(t, j.gst.SetDeadline(time.Time{}))
	buf := make([]byte, 4)
	if _, err := io.ReadFull(j.gst, buf); err != nil || string(buf) != "late" {
		t.Errorf("read %q after the deadline was taken off: %v", buf, err)
	}
	if n, err := j.gst.Read(nil); n != 0 || err != nil {
		t.Errorf("empty read: %d, %v", n, err)
	}
}

func TestDeadlineWakesABlockedRead(t *testing.T) {
	j := join(t, Limits{}, Limits{})
	got := make(chan error)
	go func() {
		_, err := j.gst.Read(make([]byte, 1))
		got <- err
	}()
	must(t, j.gst.SetReadDeadline(time.Now()))
	if err := <-got; !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error(err)
	}
}

func TestStalledReaderStallsNobodyElse(t *testing.T) {
	j := join(t, Limits{}, Limits{})
	stalled := fill(j.gst)
	gst, ast := j.open(t)
	go func() {
		_, _ = io.Copy(ast, ast)
		_ = ast.CloseWrite()
	}()
	go func() {
		_, _ = gst.Write(make([]byte, 16<<20))
		_ = gst.CloseWrite()
	}()
	if n, err := io.Copy(io.Discard, gst); n != 16<<20 || err != nil {
		t.Errorf("echo of %d bytes: %v", n, err)
	}
	must(t, j.ast.Reset("test over"))
	<-stalled
}

func TestTheMostUnreadStreamIsReset(t *testing.T) {
	j := join(t, Limits{MaxUnread: 2 << 20}, Limits{})
	small, smallPeer := j.open(t)
	write(t, smallPeer, "kept")
	var writers []<-chan error
	for range 3 {
		_, ast := j.open(t)
		writers = append(writers, fill(ast))
	}
	eventually(t, "one stream reset", func() bool { return j.gw.Stats().Resets == 1 })
	eventually(t, "bounded", func() bool { return j.gw.Stats().Unread <= 2<<20 })
	buf := make([]byte, 4)
	if _, err := io.ReadFull(small, buf); err != nil || string(buf) != "kept" {
		t.Errorf("innocent stream: %q, %v", buf, err)
	}
	must(t, j.gw.Close())
	reset := 0
	for _, w := range writers {
		if errors.Is(<-w, ErrReset) {
			reset++
		}
	}
	if reset != 1 {
		t.Errorf("%d streams reset, want 1", reset)
	}
}

func TestAddresses(t *testing.T) {
	j := join(t, Limits{}, Limits{})
	if l, r := j.gst.LocalAddr().String(), j.ast.RemoteAddr().String(); l != r {
		t.Errorf("gateway's local %s, agent's remote %s", l, r)
	}
}

func TestServeEndResetsStreams(t *testing.T) {
	a, b := sockets(t, "unix")
	gw, ag := pair(t, a, b, Limits{}, Limits{})
	ctx, cancel := context.WithCancel(t.Context())
	streams, done := make(chan *Stream, 1), make(chan error)
	go func() { done <- ag.Serve(ctx, handed(streams, ctx.Done())) }()
	st, err := gw.Open(t.Context(), wire.OpenRequest{Port: 1})
	must(t, err)
	<-streams
	cancel()
	if _, err := st.Read(make([]byte, 1)); !errors.Is(err, ErrReset) {
		t.Errorf("read: %v", err)
	}
	must(t, <-done)
}
