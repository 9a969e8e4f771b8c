package tunnel

import (
	"fmt"

	"github.com/hashicorp/yamux"
)

// inbound accounts for a frame from the peer, before yamux has it.
func (s *Session) inbound(f frame) error {
	if f.stream == controlID {
		if f.flags&flagFIN != 0 {
			return fmt.Errorf("control stream finished: %w", ErrProtocol)
		}
		return nil
	}
	s.mu.Lock()
	defer s.unlock()
	if f.flags&flagSYN != 0 {
		if s.side != agentSide || s.streams[f.stream] != nil {
			return fmt.Errorf("stream %d opened by the peer: %w", f.stream, ErrProtocol)
		}
		if len(s.streams) > s.limits.MaxStreams+backlog {
			return fmt.Errorf("%d streams: %w: %w", len(s.streams), ErrProtocol, ErrTooManyStreams)
		}
		s.streams[f.stream] = &Stream{sess: s, id: f.stream}
		s.opened++
	}
	st := s.streams[f.stream]
	if st == nil {
		return nil // finished here while the frame was on its way
	}
	if f.kind == typeData && f.length > 0 {
		if err := st.receivedLocked(int(f.length)); err != nil {
			return err
		}
	}
	if f.flags&flagFIN != 0 {
		st.finIn = true
		st.forgetLocked()
	}
	return nil
}

// outbound accounts for a frame of ours, before the peer can have it.
func (s *Session) outbound(f frame) {
	if f.stream == controlID {
		return
	}
	s.mu.Lock()
	defer s.unlock()
	if f.flags&flagSYN != 0 {
		s.streams[f.stream] = &Stream{sess: s, id: f.stream, err: s.err, dead: s.err != nil}
		s.opened++
	}
	if st := s.streams[f.stream]; st != nil && f.flags&flagFIN != 0 {
		st.finOut = true
		st.forgetLocked()
	}
}

// attach joins yamux's stream to ours; nil if ours is not there.
func (s *Session) attach(ys *yamux.Stream) *Stream {
	s.mu.Lock()
	defer s.unlock()
	st := s.streams[ys.StreamID()]
	if st == nil {
		return nil
	}
	st.mux = ys
	if st.heard {
		st.wakeLocked()
		st.answerLocked()
	}
	return st
}

func (st *Stream) receivedLocked(n int) error {
	s := st.sess
	st.unread += n
	if st.dropped {
		s.zombie += n
		if s.zombie > s.limits.MaxUnread {
			return fmt.Errorf("%d bytes on streams that were ended: %w", s.zombie, ErrProtocol)
		}
		return nil
	}
	s.live += n
	if s.live <= s.limits.MaxUnread {
		return nil
	}
	most := st
	for _, other := range s.streams {
		if !other.dropped && other.unread > most.unread {
			most = other
		}
	}
	s.log.Warn("stream reset, too many unread bytes", "stream", most.id, "unread", most.unread, "total", s.live)
	most.resetLocked("nobody reads it and the session holds too much")
	return nil
}

// consumedLocked takes n read bytes off the account.
func (st *Stream) consumedLocked(n int) {
	st.unread -= n
	if st.sess.streams[st.id] != st {
		return
	}
	if st.dropped {
		st.sess.zombie -= n
	} else {
		st.sess.live -= n
	}
	st.forgetLocked()
}

// dropLocked says that nobody will read what is unread.
func (st *Stream) dropLocked() {
	if st.dropped {
		return
	}
	st.dropped = true
	if st.sess.streams[st.id] == st {
		st.sess.live -= st.unread
		st.sess.zombie += st.unread
	}
	st.forgetLocked()
}

// forgetLocked takes the stream off the session when both ends have finished
// and nothing is left to read.
func (st *Stream) forgetLocked() {
	s := st.sess
	if s.streams[st.id] != st || !st.finIn || !st.finOut || (st.unread > 0 && !st.dropped) {
		return
	}
	delete(s.streams, st.id)
	if st.dropped {
		s.zombie -= st.unread
	}
	s.idleLocked()
}
