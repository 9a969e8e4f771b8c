package tunnel

import (
	"encoding/binary"
	"fmt"
	"net"
	"sync/atomic"
	"time"
)

// The parts of yamux's framing that link looks at (spec.md, "Framing").
const (
	headerSize = 12

	typeData   = 0
	typeWindow = 1

	flagSYN = 1
	flagACK = 2
	flagFIN = 4
	flagRST = 8

	// maxBody bounds a data frame. Both ends keep to it, so a peer in the
	// middle of one waits for at most this many bytes (see serial.go).
	maxBody = 64 << 10
)

// frame is one yamux header.
type frame struct {
	kind   uint8
	flags  uint16
	stream uint32
	length uint32
}

// parseFrame reads a header. It fails on all that this package never sends.
func parseFrame(b []byte) (frame, error) {
	f := frame{
		kind:   b[1],
		flags:  binary.BigEndian.Uint16(b[2:]),
		stream: binary.BigEndian.Uint32(b[4:]),
		length: binary.BigEndian.Uint32(b[8:]),
	}
	switch {
	case b[0] != 0:
		return f, fmt.Errorf("frame of version %d: %w", b[0], ErrProtocol)
	case f.kind > typeWindow:
		return f, fmt.Errorf("frame of type %d: %w", f.kind, ErrProtocol)
	case f.flags&^(flagSYN|flagACK|flagFIN) != 0:
		return f, fmt.Errorf("frame with flags %#x: %w", f.flags, ErrProtocol)
	case f.kind == typeData && f.length > maxBody:
		return f, fmt.Errorf("frame of %d bytes: %w", f.length, ErrProtocol)
	}
	return f, nil
}

// link is the connection below yamux. It sees each frame before yamux does on
// the way in and before the peer can on the way out: from that come liveness,
// the count of unread bytes, and the certainty that a stream's end is a real
// one. It also joins a header with what follows it into one write.
//
// Read is called by yamux's receiver only, Write by its sender only.
type link struct {
	net.Conn
	inbound  func(frame) error // may fail: then the session ends
	outbound func(frame)
	failed   func(error) // told the first error of Read or Write
	now      func() time.Duration

	lastIn, lastOut atomic.Int64 // now() at the last byte
	in, out         atomic.Uint64
	inAtOut         atomic.Uint64 // in at the last byte out

	head    [headerSize]byte // read side: header so far
	headLen int
	bodyIn  uint32 // read side: bytes of the current body to come

	pending []byte // write side: headers held back; then the buffer of the joined write
	bodyOut uint32 // write side: bytes of the body that Write gets next
}

func newLink(conn net.Conn, now func() time.Duration) *link {
	l := &link{Conn: conn, now: now}
	l.lastIn.Store(int64(now()))
	l.lastOut.Store(int64(now()))
	return l
}

// Read passes bytes on after looking at the headers in them.
func (l *link) Read(p []byte) (int, error) {
	n, err := l.Conn.Read(p)
	if n > 0 {
		l.lastIn.Store(int64(l.now()))
		l.in.Add(uint64(n))
		if bad := l.look(p[:n]); bad != nil {
			l.failed(bad)
			return 0, bad
		}
	}
	if err != nil {
		l.failed(fmt.Errorf("read link: %w", err))
	}
	return n, err
}

func (l *link) look(p []byte) error {
	for len(p) > 0 {
		if l.bodyIn > 0 {
			n := min(uint32(len(p)), l.bodyIn)
			l.bodyIn -= n
			p = p[n:]
			continue
		}
		n := copy(l.head[l.headLen:], p)
		l.headLen += n
		p = p[n:]
		if l.headLen < headerSize {
			return nil
		}
		l.headLen = 0
		f, err := parseFrame(l.head[:])
		if err == nil {
			err = l.inbound(f)
		}
		if err != nil {
			return err
		}
		if f.kind == typeData {
			l.bodyIn = f.length
		}
	}
	return nil
}

// Write takes a header, or the body of the header before. A data header waits
// for its body, and the header that opens a stream for the request that always
// follows it, so that each goes out in one write.
func (l *link) Write(p []byte) (int, error) {
	if l.bodyOut == 0 {
		f, err := parseFrame(p)
		if err != nil {
			l.failed(err)
			return 0, err
		}
		l.outbound(f)
		if f.kind == typeData {
			l.bodyOut = f.length
		}
		if l.bodyOut > 0 || f.flags&flagSYN != 0 {
			l.pending = append(l.pending, p...)
			return len(p), nil
		}
	} else {
		l.bodyOut = 0
	}
	if err := l.flush(p); err != nil {
		l.failed(fmt.Errorf("write link: %w", err))
		return 0, err
	}
	return len(p), nil
}

func (l *link) flush(p []byte) error {
	if len(l.pending) > 0 {
		// One copy and one write are faster here than a vectored write, up to
		// the largest body.
		l.pending = append(l.pending, p...)
		p = l.pending
		l.pending = l.pending[:0]
	}
	if _, err := l.Conn.Write(p); err != nil {
		return err
	}
	l.out.Add(uint64(len(p)))
	l.inAtOut.Store(l.in.Load())
	l.lastOut.Store(int64(l.now()))
	return nil
}

func (l *link) pulse() pulse {
	return pulse{
		now: l.now(), lastIn: time.Duration(l.lastIn.Load()), lastOut: time.Duration(l.lastOut.Load()),
		owed: l.in.Load() - l.inAtOut.Load(),
	}
}
