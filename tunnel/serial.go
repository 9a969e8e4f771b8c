package tunnel

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// A serial port is one pipe of bytes that outlives both programs at its ends:
// it may hold bytes of an earlier session, and one end may restart alone. Before
// a session the ends therefore agree on where the new bytes begin:
//
//	gateway -> agent   SYNC n    until answered
//	agent -> gateway   ACK n     the agent listens for a beginning
//	gateway -> agent   GO n      no SYNC follows; data follows
//	agent -> gateway   READY n   data follows
//
// A mark holds no zero byte. Wherever a peer of an old session stands, it takes
// a mark for a wrong frame and gives up: a yamux header begins with zero, and
// four printable bytes are no frame length. In the middle of a frame it first
// waits for the rest, at most maxBody bytes, so the gateway begins with more
// marks than that. What the peer's programs get of them is followed by a reset.
const (
	markLead  = "~helix!"
	markNonce = 32 // hex digits
	markSum   = 8  // hex digits of the CRC-32 before it
	markSize  = len(markLead) + 1 + markNonce + markSum + 1

	openingMarks = (maxBody+headerSize)/markSize + 2

	markSync  = 'S'
	markAck   = 'A'
	markGo    = 'G'
	markReady = 'R'
)

// The gateway's times. The READY of a live agent takes far less; a lost GO or
// READY starts another round.
const (
	syncEvery = 50 * time.Millisecond
	readyIn   = 2 * time.Second
)

// mark is one message of the exchange.
type mark struct {
	kind  byte
	nonce [markNonce]byte
}

func (m mark) append(b []byte) []byte {
	at := len(b)
	b = append(b, markLead...)
	b = append(b, m.kind)
	b = append(b, m.nonce[:]...)
	b = fmt.Appendf(b, "%08x", crc32.ChecksumIEEE(b[at:]))
	return append(b, '\n')
}

func newMark() (mark, error) {
	var raw [markNonce / 2]byte
	if _, err := rand.Read(raw[:]); err != nil {
		return mark{}, fmt.Errorf("make nonce: %w", err)
	}
	m := mark{kind: markSync}
	hex.Encode(m.nonce[:], raw[:])
	return m, nil
}

// scanner finds marks in a stream of anything. It holds less than one mark.
type scanner struct{ buf []byte }

// next returns the first mark in what was fed and drops the bytes up to its
// end; ok is false when there is none, and all that cannot begin one is dropped.
func (s *scanner) next() (m mark, ok bool) {
	for {
		i := bytes.IndexByte(s.buf, markLead[0])
		if i < 0 {
			s.buf = s.buf[:0]
			return mark{}, false
		}
		s.buf = s.buf[i:]
		if len(s.buf) < markSize {
			head := min(len(s.buf), len(markLead))
			if string(s.buf[:head]) == markLead[:head] {
				return mark{}, false
			}
		} else if m, ok := parseMark(s.buf[:markSize]); ok {
			s.buf = s.buf[markSize:]
			return m, true
		}
		s.buf = s.buf[1:]
	}
}

func parseMark(b []byte) (mark, bool) {
	m := mark{kind: b[len(markLead)]}
	copy(m.nonce[:], b[len(markLead)+1:])
	for _, c := range m.nonce {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return mark{}, false
		}
	}
	switch m.kind {
	case markSync, markAck, markGo, markReady:
		return m, bytes.Equal(b, m.append(make([]byte, 0, markSize)))
	}
	return mark{}, false
}

// OpenSerialGateway finds the beginning of a new session on rwc, waiting for an
// agent as long as ctx lets it. It owns rwc from then on: when it fails, rwc is
// closed. The connection has deadlines and addresses as far as rwc has them,
// and its Close ends a blocked Read if rwc's does.
func OpenSerialGateway(ctx context.Context, rwc io.ReadWriteCloser) (net.Conn, error) {
	stop := context.AfterFunc(ctx, func() { _ = rwc.Close() }) // ctx's error is the one reported
	g := &gatewaySync{rwc: rwc, acked: make(chan struct{}, 1), ended: make(chan struct{})}
	go g.read()
	err := g.run()
	if !stop() {
		err = context.Cause(ctx)
	}
	if err != nil {
		_ = rwc.Close() // err says more
		<-g.ended
		return nil, fmt.Errorf("open serial link: %w", err)
	}
	return &serialConn{ReadWriteCloser: rwc, rest: g.rest}, nil
}

// gatewaySync is the gateway's half of the exchange. read and run are its two
// goroutines; read ends before run says success.
type gatewaySync struct {
	rwc   io.ReadWriteCloser
	acked chan struct{} // holds one token: the current SYNC was answered
	ended chan struct{} // closed when read has returned

	mu   sync.Mutex
	want mark   // the current round's SYNC
	err  error  // of read, when it ended without READY
	rest []byte // what followed READY
}

func (g *gatewaySync) read() {
	defer close(g.ended)
	err := scan(g.rwc, func(m mark, rest []byte) (bool, error) {
		g.mu.Lock()
		defer g.mu.Unlock()
		if m.nonce != g.want.nonce {
			return false, nil
		}
		switch m.kind {
		case markAck:
			select {
			case g.acked <- struct{}{}:
			default:
			}
		case markReady:
			g.rest = bytes.Clone(rest)
			return true, nil
		}
		return false, nil
	}, func() error { return nil })
	g.mu.Lock()
	defer g.mu.Unlock()
	g.err = err
}

// run makes rounds until read has met the READY of one.
func (g *gatewaySync) run() error {
	ticker := time.NewTicker(syncEvery)
	defer ticker.Stop()
	for {
		m, err := newMark()
		if err != nil {
			return err
		}
		g.mu.Lock()
		g.want = m
		select {
		case <-g.acked:
		default:
		}
		g.mu.Unlock()
		out := bytes.Repeat(m.append(nil), openingMarks)
		for acked := false; !acked; {
			if _, err := g.rwc.Write(out); err != nil {
				return err
			}
			out = out[:markSize]
			select {
			case <-g.acked:
				acked = true
			case <-ticker.C:
			case <-g.ended:
				return g.result()
			}
		}
		m.kind = markGo
		if _, err := g.rwc.Write(m.append(nil)); err != nil {
			return err
		}
		select {
		case <-g.ended:
			return g.result()
		case <-time.After(readyIn):
		}
	}
}

func (g *gatewaySync) result() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.err
}

// OpenSerialAgent answers a gateway that begins a session on rwc, waiting for
// one as long as ctx lets it. Ownership, deadlines and Close are as for
// OpenSerialGateway. After a session, call it again on the reopened port.
func OpenSerialAgent(ctx context.Context, rwc io.ReadWriteCloser) (net.Conn, error) {
	stop := context.AfterFunc(ctx, func() { _ = rwc.Close() }) // ctx's error is the one reported
	conn := &serialConn{ReadWriteCloser: rwc}
	var heard mark
	owed := false
	err := scan(rwc, func(m mark, rest []byte) (bool, error) {
		switch {
		case m.kind == markSync:
			heard, owed = m, true
		case m.kind == markGo && m.nonce == heard.nonce:
			conn.rest = bytes.Clone(rest)
			m.kind = markReady
			_, err := rwc.Write(m.append(nil))
			return true, err
		}
		return false, nil
	}, func() error {
		if !owed {
			return nil
		}
		// One answer to all the marks of one read: they come in hundreds.
		owed = false
		_, err := rwc.Write(mark{kind: markAck, nonce: heard.nonce}.append(nil))
		return err
	})
	if !stop() {
		err = context.Cause(ctx)
	}
	if err != nil {
		_ = rwc.Close() // err says more
		return nil, fmt.Errorf("open serial link: %w", err)
	}
	return conn, nil
}

// scan calls got for each mark from r, with the bytes behind it (valid during
// the call), until got says stop; after each read it calls between.
func scan(r io.Reader, got func(m mark, rest []byte) (stop bool, err error), between func() error) error {
	var sc scanner
	buf := make([]byte, 32<<10)
	for {
		n, err := r.Read(buf)
		sc.buf = append(sc.buf, buf[:n]...)
		for {
			m, ok := sc.next()
			if !ok {
				break
			}
			if stop, err := got(m, sc.buf); stop || err != nil {
				return err
			}
		}
		if err == nil {
			err = between()
		}
		if err != nil {
			return err
		}
	}
}

// serialConn makes a connection of a synchronised port. Read is for one
// goroutine at a time.
type serialConn struct {
	io.ReadWriteCloser
	rest []byte // read ahead
}

// Read gives what was read ahead first.
func (c *serialConn) Read(p []byte) (int, error) {
	if len(c.rest) > 0 {
		n := copy(p, c.rest)
		c.rest = c.rest[n:]
		return n, nil
	}
	return c.ReadWriteCloser.Read(p)
}

type serialAddr struct{}

func (serialAddr) Network() string { return "serial" }
func (serialAddr) String() string  { return "serial" }

// LocalAddr is rwc's, if it has one.
func (c *serialConn) LocalAddr() net.Addr {
	if a, ok := c.ReadWriteCloser.(interface{ LocalAddr() net.Addr }); ok {
		return a.LocalAddr()
	}
	return serialAddr{}
}

// RemoteAddr is rwc's, if it has one.
func (c *serialConn) RemoteAddr() net.Addr {
	if a, ok := c.ReadWriteCloser.(interface{ RemoteAddr() net.Addr }); ok {
		return a.RemoteAddr()
	}
	return serialAddr{}
}

// SetDeadline fails with os.ErrNoDeadline if rwc has none.
func (c *serialConn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

// SetReadDeadline fails with os.ErrNoDeadline if rwc has none.
func (c *serialConn) SetReadDeadline(t time.Time) error {
	if d, ok := c.ReadWriteCloser.(interface{ SetReadDeadline(t time.Time) error }); ok {
		return d.SetReadDeadline(t)
	}
	return os.ErrNoDeadline
}

// SetWriteDeadline fails with os.ErrNoDeadline if rwc has none.
func (c *serialConn) SetWriteDeadline(t time.Time) error {
	if d, ok := c.ReadWriteCloser.(interface{ SetWriteDeadline(t time.Time) error }); ok {
		return d.SetWriteDeadline(t)
	}
	return os.ErrNoDeadline
}
