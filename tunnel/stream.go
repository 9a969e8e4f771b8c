package tunnel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync/atomic"
	"time"

	"github.com/hashicorp/yamux"

	"helix.local/helix/agent/wire"
)

// Stream is one flow of a session: a net.Conn with a half-close and a reset.
// Its methods may be called concurrently, the ending ones more than once.
//
// Read returns io.EOF only after the peer's last byte. After the peer has reset
// the stream, or the session has died, bytes that came before can still be
// read; then the error is ErrReset or ErrClosed.
//
// A deadline also ends a call that waits for the peer. A Write that waits for
// the link itself ends when the link moves or the session dies, at the latest
// after Limits.ProbeActive + Dead of silence.
type Stream struct {
	sess *Session
	id   uint32
	mux  *yamux.Stream // set once, under sess.mu, before anybody has the Stream

	readBy, writeBy atomic.Int64 // deadlines in UnixNano, 0 none
	readEnd         atomic.Bool  // hints that the locked fields below forbid it
	writeEnd        atomic.Bool

	// The rest is guarded by sess.mu.
	unread        int   // bytes in from the peer and not read
	finIn, finOut bool  // that side has finished writing
	err           error // the stream was reset, or the session died
	dead          bool  // err is the session's
	finishing     bool  // CloseWrite was called
	closed        bool  // Close was called
	dropped       bool  // nobody will read unread
	stopped       bool  // the peer reads no more
	sent, heard   bool  // reset frames; after both, the stream can be finished
	hook          func()
}

// wakeLocked ends blocked calls of yamux; ours then say why.
func (st *Stream) wakeLocked() {
	st.readEnd.Store(st.dropped)
	st.writeEnd.Store(true)
	if st.mux != nil {
		past := time.Unix(1, 0)
		_ = st.mux.SetReadDeadline(past)  // never fails
		_ = st.mux.SetWriteDeadline(past) // never fails
	}
}

func (st *Stream) endLocked(err error) {
	st.err = err
	st.wakeLocked()
	if st.hook != nil {
		st.sess.after = append(st.sess.after, st.hook)
		st.hook = nil
	}
}

// failLocked is the session's death.
func (st *Stream) failLocked(err error) {
	if st.err == nil {
		st.dead = true
		st.endLocked(err)
	}
}

// setHook has f called once when the stream is reset or the session dies, at
// once if that was so before; nil takes the hook away.
func (st *Stream) setHook(f func()) {
	s := st.sess
	s.mu.Lock()
	defer s.unlock()
	if st.err != nil && f != nil {
		s.after = append(s.after, f)
		return
	}
	st.hook = f
}

// resetLocked aborts the stream from this end. The other end answers with its
// own reset frame before either finishes the stream, so that no reader there
// can take the abort for a clean end.
func (st *Stream) resetLocked(reason string) {
	st.dropLocked()
	if st.err != nil {
		st.wakeLocked()
		return
	}
	s := st.sess
	s.resets++
	st.endLocked(fmt.Errorf("%w here: %s", ErrReset, reason))
	if s.streams[st.id] == st {
		st.answerLocked()
	}
}

func (st *Stream) peerResetLocked(reason string) {
	if st.heard {
		return
	}
	st.heard = true
	if st.err == nil {
		st.sess.resets++
		st.endLocked(fmt.Errorf("%w by the peer: %s", ErrReset, reason))
	}
	if st.mux != nil { // else attach answers: yamux must acknowledge the opening first
		st.answerLocked()
	}
}

func (st *Stream) answerLocked() {
	s := st.sess
	if !st.sent {
		st.sent = true
		reason := "answer"
		if st.err != nil && !st.heard {
			reason = plain(st.err.Error())
		}
		s.sendLocked(action{frame: wire.Control{Kind: wire.ControlReset, Stream: st.id, Reason: reason}})
	}
	if st.heard {
		s.sendLocked(action{fin: st})
	}
}

// peerStopLocked ends our writing, not our reading: the peer has closed.
func (st *Stream) peerStopLocked() {
	if st.stopped || st.mux == nil {
		return
	}
	st.stopped = true
	st.writeEnd.Store(true)
	_ = st.mux.SetWriteDeadline(time.Unix(1, 0)) // never fails
	st.sess.sendLocked(action{fin: st})
}

func (st *Stream) abort(reason string) {
	st.sess.mu.Lock()
	defer st.sess.unlock()
	st.resetLocked(reason)
}

// Reset aborts the stream at both ends at once, whatever waits in it. The
// peer's reader gets what had arrived, then ErrReset.
func (st *Stream) Reset(reason string) error {
	st.abort(plain(reason))
	return nil
}

// Read reads what the peer wrote.
func (st *Stream) Read(p []byte) (int, error) {
	if st.readEnd.Load() || expired(&st.readBy) {
		if err := st.readError(nil); err != nil {
			return 0, err
		}
	}
	if len(p) == 0 {
		return 0, nil
	}
	n, err := st.mux.Read(p)
	if n > 0 {
		st.sess.mu.Lock()
		st.consumedLocked(n)
		st.sess.unlock()
		return n, nil // an error comes again with the next Read
	}
	return 0, st.readError(err)
}

// readError says why a Read ends. With got nil it may return nil: read on.
func (st *Stream) readError(got error) error {
	if why, lost := st.whyRead(got); !lost {
		return why
	}
	return st.sess.lost()
}

// whyRead decides; lost is yamux's end, of which the session knows shortly.
func (st *Stream) whyRead(got error) (why error, lost bool) {
	s := st.sess
	s.mu.Lock()
	defer s.unlock()
	complete := errors.Is(got, io.EOF) && st.finIn && st.unread == 0
	switch {
	case st.err != nil && st.dropped:
		return st.err, false
	case st.closed:
		return net.ErrClosed, false
	case complete && (st.err == nil || st.dead):
		return io.EOF, false
	case st.err != nil && got != nil:
		return st.err, false
	case expired(&st.readBy):
		return os.ErrDeadlineExceeded, false
	case got == nil:
		return nil, false
	case errors.Is(got, yamux.ErrTimeout):
		return os.ErrDeadlineExceeded, false // it was moved meanwhile
	}
	return nil, true
}

// Write sends p in frames of at most 64 KiB, waiting while the peer's window is
// full.
func (st *Stream) Write(p []byte) (int, error) {
	total := 0
	for {
		if st.writeEnd.Load() || expired(&st.writeBy) {
			if err := st.writeError(nil); err != nil {
				return total, err
			}
		}
		n, err := st.mux.Write(p[:min(len(p), maxBody)])
		total += n
		p = p[n:]
		if err != nil {
			return total, st.writeError(err)
		}
		if len(p) == 0 {
			return total, nil
		}
	}
}

func (st *Stream) writeError(got error) error {
	if why, lost := st.whyWrite(got); !lost {
		return why
	}
	return st.sess.lost()
}

// whyWrite is whyRead for writes.
func (st *Stream) whyWrite(got error) (why error, lost bool) {
	s := st.sess
	s.mu.Lock()
	defer s.unlock()
	switch {
	case st.err != nil:
		return st.err, false
	case st.closed:
		return net.ErrClosed, false
	case st.stopped:
		return errStopped, false
	case expired(&st.writeBy):
		return os.ErrDeadlineExceeded, false
	case got == nil:
		return nil, false
	case errors.Is(got, yamux.ErrTimeout):
		return os.ErrDeadlineExceeded, false
	case st.finishing:
		return fmt.Errorf("write after CloseWrite: %w", net.ErrClosed), false
	}
	return nil, true
}

// CloseWrite tells the peer that no more bytes follow; reading goes on, for any
// length of time.
func (st *Stream) CloseWrite() error {
	st.sess.mu.Lock()
	err := st.err
	st.finishing = true
	st.sess.mu.Unlock()
	if err != nil {
		return err
	}
	return st.mux.Close() // yamux's Close is the half-close; twice is nothing
}

// Close finishes both ways: the peer reads what was written and then io.EOF,
// and its further writes fail with ErrReset. It does not wait.
func (st *Stream) Close() error {
	s := st.sess
	s.mu.Lock()
	defer s.unlock()
	if st.closed {
		return nil
	}
	st.closed = true
	st.dropLocked()
	st.wakeLocked()
	st.hook = nil
	if st.err != nil {
		return nil
	}
	s.sendLocked(action{fin: st})
	if !st.finIn {
		s.sendLocked(action{frame: wire.Control{Kind: wire.ControlStop, Stream: st.id}})
	}
	return nil
}

func expired(by *atomic.Int64) bool {
	t := by.Load()
	return t != 0 && time.Now().UnixNano() >= t
}

// SetDeadline sets both deadlines; the zero time is none.
func (st *Stream) SetDeadline(t time.Time) error {
	return errors.Join(st.SetReadDeadline(t), st.SetWriteDeadline(t))
}

// SetReadDeadline ends reads at t with os.ErrDeadlineExceeded.
func (st *Stream) SetReadDeadline(t time.Time) error {
	s := st.sess
	s.mu.Lock()
	defer s.mu.Unlock()
	if st.closed {
		return net.ErrClosed
	}
	st.readBy.Store(nano(t))
	if st.err != nil {
		return nil // the deadline in yamux is what wakes
	}
	return st.mux.SetReadDeadline(t)
}

// SetWriteDeadline ends writes at t with os.ErrDeadlineExceeded.
func (st *Stream) SetWriteDeadline(t time.Time) error {
	s := st.sess
	s.mu.Lock()
	defer s.mu.Unlock()
	if st.closed {
		return net.ErrClosed
	}
	st.writeBy.Store(nano(t))
	if st.err != nil || st.stopped {
		return nil
	}
	return st.mux.SetWriteDeadline(t)
}

func nano(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

// LocalAddr is the link's.
func (st *Stream) LocalAddr() net.Addr { return st.mux.LocalAddr() }

// RemoteAddr is the link's.
func (st *Stream) RemoteAddr() net.Addr { return st.mux.RemoteAddr() }

// readReply waits for the agent's answer to an open.
func (st *Stream) readReply(ctx context.Context, req wire.OpenRequest) error {
	var reply wire.OpenReply
	stop := context.AfterFunc(ctx, func() { st.abort("open given up") })
	err := wire.ReadFrame(st, &reply)
	if !stop() && ctx.Err() != nil {
		st.abort("open given up")
		return fmt.Errorf("open %s: %w", describe(req), context.Cause(ctx))
	}
	switch {
	case errors.Is(err, io.EOF):
		err = fmt.Errorf("no answer: %w", ErrProtocol)
		fallthrough
	case err != nil:
		st.abort("bad answer")
		return fmt.Errorf("open %s: %w", describe(req), err)
	case reply.Status != wire.StatusOK:
		_ = st.Close() // never fails
		return &OpenError{Request: req, Status: wire.Status(plain(string(reply.Status))), Message: plain(reply.Message)}
	}
	return nil
}
