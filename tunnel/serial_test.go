package tunnel

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"testing"
	"time"

	"helix.local/helix/agent/wire"
)

func testMark(kind byte) mark {
	m := mark{kind: kind}
	copy(m.nonce[:], "0123456789abcdef0123456789abcdef")
	return m
}

func TestScannerFindsMarksInAnything(t *testing.T) {
	whole := string(testMark(markGo).append(nil))
	for name, c := range map[string]struct {
		in   string
		want int
		left string
	}{
		"alone":              {whole, 1, ""},
		"after rubbish":      {"\x00\x00~hel~helix!~~" + whole, 1, ""},
		"with rest":          {whole + "rest", 1, "rest"},
		"two":                {whole + whole, 2, ""},
		"lost byte":          {whole[:20] + whole[21:] + whole, 1, ""},
		"doubled byte":       {whole[:20] + whole[19:] + whole, 1, ""},
		"cut":                {whole[:30] + whole, 1, ""},
		"changed":            {whole[:30] + "#" + whole[31:], 0, ""},
		"begin only":         {"xx~heli", 0, "~heli"},
		"begin of something": {"~help", 0, ""},
	} {
		for _, size := range []int{1, 7, 1 << 20} {
			var sc scanner
			found := 0
			for at := 0; at < len(c.in) && found < max(c.want, 1); at += size {
				sc.buf = append(sc.buf, c.in[at:min(at+size, len(c.in))]...)
				for found < max(c.want, 1) {
					m, ok := sc.next()
					if !ok {
						break
					}
					if m != testMark(markGo) {
						t.Errorf("%s: %+v", name, m)
					}
					found++
				}
			}
			if found != c.want || size > 100 && string(sc.buf) != c.left {
				t.Errorf("%s by %d: found %d, left %q", name, size, found, sc.buf)
			}
		}
	}
	if b := testMark(markSync).append(nil); len(b) != markSize || bytes.IndexByte(b, 0) >= 0 {
		t.Errorf("mark %q", b)
	}
	if _, err := parseFrame([]byte(whole)[1:]); err == nil {
		t.Error("a mark passes for a frame")
	}
}

func FuzzScanner(f *testing.F) {
	whole := testMark(markSync).append(nil)
	f.Add(whole, []byte("x"))
	f.Add([]byte("~helix!S~helix!"), whole[:40])
	f.Add(append([]byte("~~he"), whole...), []byte{})
	f.Fuzz(func(t *testing.T, a, b []byte) {
		var at, once scanner
		count := func(s *scanner, p []byte) (n int) {
			s.buf = append(s.buf, p...)
			for {
				m, ok := s.next()
				if !ok {
					break
				}
				n++
				if back, ok := parseMark(m.append(nil)); !ok || back != m {
					t.Fatalf("%+v does not survive", m)
				}
			}
			if len(s.buf) >= markSize {
				t.Fatalf("holds %d bytes", len(s.buf))
			}
			return n
		}
		split := count(&at, a) + count(&at, b)
		if whole := count(&once, append(bytes.Clone(a), b...)); whole != split {
			t.Fatalf("%d marks at once, %d in two parts", whole, split)
		}
		// Whatever came before, the next mark but one is found: the first may be
		// taken into a lead that was rubbish.
		m := testMark(markSync).append(nil)
		if count(&at, bytes.Repeat(m, 2)) == 0 {
			t.Fatal("deaf")
		}
	})
}

func FuzzFrames(f *testing.F) {
	f.Add([]byte{0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 1, 'x'}, uint8(5))
	f.Add([]byte{0, 1, 0, 1, 0, 0, 0, 3, 0, 0, 0, 0, 0, 1, 0, 4, 0, 0, 0, 3, 0, 0, 0, 0}, uint8(1))
	f.Add([]byte("~helix!S"), uint8(3))
	f.Fuzz(func(t *testing.T, in []byte, size uint8) {
		read := func(step int) (frames []frame, failed bool) {
			l := newLink(nil, func() time.Duration { return 0 })
			l.inbound = func(f frame) error {
				frames = append(frames, f)
				return nil
			}
			for at := 0; at < len(in); at += step {
				if err := l.look(in[at:min(at+step, len(in))]); err != nil {
					return frames, true
				}
			}
			return frames, false
		}
		whole, bad := read(len(in) + 1)
		parts, badParts := read(int(size) + 1)
		if bad != badParts || len(whole) != len(parts) {
			t.Fatalf("%v %v at once, %v %v in parts", whole, bad, parts, badParts)
		}
		for i := range whole {
			if whole[i] != parts[i] {
				t.Fatalf("frame %d: %v, %v", i, whole[i], parts[i])
			}
		}
	})
}

// port is a serial port between two programs: a pair of pipes that outlives the
// connections over it. Each end is opened anew after Close.
type port struct{ toAgent, toGateway *fifo }

func newPort(t *testing.T) *port {
	t.Helper()
	return &port{newFifo(t), newFifo(t)}
}

type fifo struct{ r, w *os.File }

func newFifo(t *testing.T) *fifo {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = r.Close()
		_ = w.Close()
	})
	return &fifo{r, w}
}

func (p *port) gateway() *portEnd { return &portEnd{in: p.toGateway.r, out: p.toAgent.w} }
func (p *port) agent() *portEnd   { return &portEnd{in: p.toAgent.r, out: p.toGateway.w} }

// portEnd is one opening of an end: Close ends its calls, not the pipe.
type portEnd struct{ in, out *os.File }

func (e *portEnd) Read(b []byte) (int, error)  { return e.in.Read(b) }
func (e *portEnd) Write(b []byte) (int, error) { return e.out.Write(b) }
func (e *portEnd) SetReadDeadline(t time.Time) error {
	return e.in.SetReadDeadline(t)
}

func (e *portEnd) Close() error {
	past := time.Unix(1, 0)
	return errors.Join(e.in.SetReadDeadline(past), e.out.SetWriteDeadline(past))
}

// reopen takes back what Close did.
func (e *portEnd) reopen() *portEnd {
	_ = e.in.SetReadDeadline(time.Time{})
	_ = e.out.SetWriteDeadline(time.Time{})
	return e
}

// serialAgent keeps a session up on its end of the port, as the agent does.
func serialAgent(t *testing.T, p *port) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	key := newKey(t)
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			conn, err := OpenSerialAgent(ctx, p.agent().reopen())
			if err != nil {
				continue
			}
			s, err := Connect(ctx, conn, AgentConfig{Target: "t", Link: wire.LinkSerial, Key: key})
			if err != nil {
				continue
			}
			_ = s.Serve(ctx, func(context.Context, wire.OpenRequest) (Conn, error) {
				return Local(func(_ context.Context, st *Stream) {
					_, _ = io.Copy(st, st)
					_ = st.CloseWrite()
				}), nil
			})
			_ = s.Close()
		}
	}()
	t.Cleanup(func() {
		cancel()
		_ = p.agent().Close()
		<-done
	})
}

// serialGateway opens a session on the gateway's end and tries it.
func serialGateway(t *testing.T, p *port, key ed25519.PrivateKey) *Session {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for {
		conn, err := OpenSerialGateway(ctx, p.gateway().reopen())
		if err != nil {
			t.Fatal(err)
		}
		s, err := Accept(ctx, conn, GatewayConfig{Key: key, Offer: accept(1)})
		if err != nil {
			if ctx.Err() != nil {
				t.Fatal(err)
			}
			continue
		}
		st, err := s.Open(ctx, wire.OpenRequest{Port: 1})
		must(t, err)
		write(t, st, "echo")
		must(t, st.CloseWrite())
		if got := readAll(t, st); got != "echo" {
			t.Fatalf("echo %q", got)
		}
		return s
	}
}

func TestSerialSurvivesRestartsOfTheGateway(t *testing.T) {
	p := newPort(t)
	serialAgent(t, p)
	key := newKey(t)
	var stale []byte
	for i := range 12 {
		s := serialGateway(t, p, key)
		// The gateway dies without a word, in the middle of something.
		st, err := s.Open(t.Context(), wire.OpenRequest{Port: 1})
		must(t, err)
		_ = fill(st)
		_ = p.gateway().Close()
		<-s.Done()
		p.gateway().reopen()
		switch i % 4 {
		case 1: // a header whose body never comes
			stale = append(stale[:0], 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0)
		case 2: // a few bytes of a header
			stale = append(stale[:0], 0, 0, 0)
		case 3: // rubbish with the begin of a mark
			stale = append(stale[:0], []byte("~helix!S0123~helix!G")...)
		}
		if _, err := p.toAgent.w.Write(stale); err != nil {
			t.Fatal(err)
		}
		// The agent may be closing its end just now.
		if _, err := p.toGateway.w.Write(stale); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatal(err)
		}
	}
	must(t, serialGateway(t, p, key).Close())
}

// Before it listens, the agent's end holds the bytes of an earlier session and
// a mutilated exchange: bytes lost, doubled, cut at any place.
func TestSerialOverMutilatedBytes(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	clean := bytes.Join([][]byte{
		testMark(markSync).append(nil), testMark(markAck).append(nil), testMark(markGo).append(nil), testMark(markReady).append(nil),
		{0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 9},
		[]byte("nine byte"),
		{0, 0, 0, 40},
		[]byte(`{"version":1}`),
	}, nil)
	mutilate := func() []byte {
		b := bytes.Clone(clean)
		for range random.IntN(4) {
			i := random.IntN(len(b))
			switch random.IntN(3) {
			case 0:
				b = append(b[:i], b[i+1:]...)
			case 1:
				b = append(b[:i], append([]byte{b[i]}, b[i:]...)...)
			case 2:
				b[i] ^= 0x55
			}
		}
		return b[random.IntN(len(b)):]
	}
	key := newKey(t)
	for range 25 {
		p := newPort(t)
		for _, w := range []*os.File{p.toAgent.w, p.toGateway.w} {
			if _, err := w.Write(mutilate()); err != nil {
				t.Fatal(err)
			}
		}
		serialAgent(t, p)
		must(t, serialGateway(t, p, key).Close())
	}
}

// A GO that is lost costs one round, not the link.
func TestSerialLostGo(t *testing.T) {
	p := newPort(t)
	done := make(chan error)
	go func() {
		_, err := OpenSerialGateway(t.Context(), p.gateway())
		done <- err
	}()
	var lost int
	heard := testMark(markSync)
	err := scan(p.toAgent.r, func(m mark, _ []byte) (bool, error) {
		if m.kind == markSync && m.nonce != heard.nonce {
			heard = m
			m.kind = markAck
			return false, second(p.toGateway.w.Write(m.append(nil)))
		}
		if m.kind == markGo {
			lost++
			if lost == 2 {
				m.kind = markReady
				return true, second(p.toGateway.w.Write(m.append(nil)))
			}
		}
		return false, nil
	}, func() error { return nil })
	must(t, err, <-done)
}

func TestSerialEndsWithItsContext(t *testing.T) {
	for name, open := range map[string]func(context.Context, io.ReadWriteCloser) (net.Conn, error){
		"gateway": OpenSerialGateway, "agent": OpenSerialAgent,
	} {
		a, _ := sockets(t, "unix")
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(10*time.Millisecond, cancel)
		if _, err := open(ctx, a); !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", name, err)
		}
		b, peer := sockets(t, "unix")
		must(t, peer.Close())
		if _, err := open(t.Context(), b); err == nil || errors.Is(err, context.Canceled) {
			t.Errorf("%s on a dead port: %v", name, err)
		}
	}
}

func TestSerialConnHasWhatThePortHas(t *testing.T) {
	a, b := sockets(t, "tcp")
	got := make(chan net.Conn)
	go func() {
		c, err := OpenSerialAgent(t.Context(), b)
		if err != nil {
			t.Error(err)
		}
		got <- c
	}()
	gw, err := OpenSerialGateway(t.Context(), a)
	must(t, err)
	ag := <-got
	must(t, gw.SetDeadline(time.Now().Add(-time.Second)))
	if _, err := gw.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error(err)
	}
	if gw.LocalAddr().String() != ag.RemoteAddr().String() {
		t.Errorf("%v, %v", gw.LocalAddr(), ag.RemoteAddr())
	}
	bare := &serialConn{ReadWriteCloser: struct{ io.ReadWriteCloser }{}, rest: []byte("rest")}
	if err := bare.SetDeadline(time.Now()); !errors.Is(err, os.ErrNoDeadline) {
		t.Error(err)
	}
	if bare.LocalAddr().String() != "serial" || bare.RemoteAddr().Network() != "serial" {
		t.Errorf("%v, %v", bare.LocalAddr(), bare.RemoteAddr())
	}
	buf := make([]byte, 9)
	if n, err := bare.Read(buf); string(buf[:n]) != "rest" || err != nil {
		t.Errorf("%q, %v", buf[:n], err)
	}
}
