package tunnel

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

const (
	relayBuffer = 64 << 10
	idleBuffer  = 4 << 10 // what a direction holds while little passes

	// relayGrace is how long bytes that came before an abort may take to be
	// passed on to a side that reads slowly.
	relayGrace = 5 * time.Second
)

var bigBuffers = sync.Pool{New: func() any { b := make([]byte, relayBuffer); return &b }}

// errPeerReset is a reset that the operating system reported as an end.
var errPeerReset = fmt.Errorf("%w: connection aborted by the peer", ErrReset)

// Relay copies both ways between a and b until both ways have ended, and closes
// both. An end of one side is passed on as CloseWrite, a reset or any other
// fault as a reset: Reset(string) where the side has it, RST on TCP. It returns
// nil when both ways ended cleanly. When ctx ends, both sides are reset.
func Relay(ctx context.Context, a, b Conn) error {
	r := &relay{side: [2]relaySide{{conn: a}, {conn: b}}}
	for i, c := range []Conn{a, b} {
		if st, ok := c.(*Stream); ok {
			st.setHook(func() { r.failed(i, st.endError(), 0) })
			defer st.setHook(nil)
		}
	}
	stop := context.AfterFunc(ctx, func() { r.abort(context.Cause(ctx)) })
	defer stop()
	var other sync.WaitGroup
	other.Go(func() { r.half(0) })
	r.half(1)
	other.Wait()
	return r.finish()
}

type relay struct {
	mu   sync.Mutex
	side [2]relaySide
	err  error // the first
	over bool  // both sides are being reset
}

type relaySide struct {
	conn     Conn
	broken   bool // takes no more bytes; what it sent before may still be read
	finished bool // we have passed an end on to it
}

// half copies from side i to the other until i ends.
func (r *relay) half(i int) {
	src, dst := r.side[i].conn, r.side[1-i].conn
	small := make([]byte, idleBuffer)
	buf := small
	var big *[]byte
	defer func() {
		if big != nil {
			bigBuffers.Put(big)
		}
	}()
	for {
		n, err := src.Read(buf)
		if n > 0 {
			if _, werr := dst.Write(buf[:n]); werr != nil {
				if !errors.Is(werr, errStopped) {
					r.failed(1-i, werr, relayGrace)
				}
				return
			}
		}
		if err != nil {
			r.ended(i, err)
			return
		}
		switch {
		case n == len(small) && big == nil:
			big = bigBuffers.Get().(*[]byte)
			buf = *big
		case n < len(small)/2 && big != nil:
			bigBuffers.Put(big)
			big, buf = nil, small
		}
	}
}

// ended handles the end of reading side i.
func (r *relay) ended(i int, err error) {
	r.mu.Lock()
	broken, finished, dstBroken := r.side[i].broken, r.side[i].finished, r.side[1-i].broken
	r.mu.Unlock()
	if errors.Is(err, io.EOF) {
		// A write may have taken the reset of a TCP connection, which then
		// reads as an end. Without our own FIN only a reset closes a socket.
		if broken || !finished && abortedTCP(r.side[i].conn) {
			r.abort(errPeerReset)
			return
		}
		r.mu.Lock()
		r.side[1-i].finished = true
		r.mu.Unlock()
		if err := r.side[1-i].conn.CloseWrite(); err != nil && !dstBroken {
			r.failed(1-i, err, relayGrace)
		}
		return
	}
	if dstBroken && !broken {
		return // woken because nobody takes its bytes; the other half ends the relay
	}
	r.abort(err)
}

// failed notes that side i takes no more bytes. The half that reads from i
// passes on what i had sent, for a limited time, and then resets both.
func (r *relay) failed(i int, err error, readGrace time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.over || r.side[i].broken {
		return
	}
	r.side[i].broken = true
	if r.err == nil {
		r.err = err
	}
	now := time.Now()
	if readGrace > 0 {
		_ = r.side[i].conn.SetReadDeadline(now.Add(readGrace)) // best effort: reads of i end by themselves
	}
	_ = r.side[1-i].conn.SetReadDeadline(now) // the same
	_ = r.side[1-i].conn.SetWriteDeadline(now.Add(relayGrace))
}

func (r *relay) abort(err error) {
	r.mu.Lock()
	if r.err == nil {
		r.err = err
	}
	first := !r.over
	r.over = true
	reason := r.err.Error()
	r.mu.Unlock()
	if first {
		abort(r.side[0].conn, reason)
		abort(r.side[1].conn, reason)
	}
}

// finish closes both sides after both halves have ended.
func (r *relay) finish() error {
	r.mu.Lock()
	broken, err := r.side[0].broken || r.side[1].broken, r.err
	r.mu.Unlock()
	if broken {
		r.abort(err)
	}
	for _, s := range r.side {
		_ = s.conn.Close() // both ways have ended already
	}
	if err == nil {
		return nil
	}
	return fmt.Errorf("relay: %w", err)
}

// abort ends c so that its peer cannot take it for a clean end, as far as c's
// kind allows: a unix socket only tells it from unread bytes.
func abort(c net.Conn, reason string) {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn() // its Close would send a clean end
	}
	switch c := c.(type) {
	case interface{ Reset(reason string) error }:
		_ = c.Reset(reason) // Close below is all that is left
	case interface{ SetLinger(sec int) error }:
		_ = c.SetLinger(0) // the same
	}
	_ = c.Close() // the connection is given up
}

func (st *Stream) endError() error {
	st.sess.mu.Lock()
	defer st.sess.mu.Unlock()
	return st.err
}
