package tunnel

import (
	"context"
	"errors"
	"fmt"
	"time"

	"helix.local/helix/agent/wire"
)

// action is one thing for the control writer to do, in order: a frame to send,
// or a stream to finish sending on.
type action struct {
	frame wire.Control
	fin   *Stream
	sent  chan<- struct{} // closed when done, if not nil
}

const (
	maxPongs = 64 // answers owed to a peer that does not read them

	// maxQueue bounds out beyond what streams can cause (two frames and an end
	// each): a peer that takes no control frames loses the session.
	maxQueue = 4096
)

// send queues an action. It never blocks.
func (s *Session) send(a action) {
	s.mu.Lock()
	defer s.unlock()
	s.sendLocked(a)
}

func (s *Session) sendLocked(a action) {
	if s.err != nil {
		return
	}
	if len(s.out) > maxQueue+3*s.limits.MaxStreams {
		s.after = append(s.after, func() { s.die(fmt.Errorf("control frames pile up: %w", ErrProtocol)) })
		return
	}
	s.out = append(s.out, a)
	select {
	case s.queue <- struct{}{}:
	default:
	}
}

// writeControl is the only writer of the control stream. Streams are finished
// here too, so that nothing else has to block on the link to end one.
func (s *Session) writeControl() {
	for {
		select {
		case <-s.queue:
		case <-s.dying:
			return
		}
		s.mu.Lock()
		batch := s.out
		s.out = nil
		s.pongs = 0
		s.mu.Unlock()
		for _, a := range batch {
			var err error
			if a.fin != nil {
				err = a.fin.mux.Close()
			} else {
				err = wire.WriteFrame(s.ctl, a.frame)
			}
			if err != nil {
				return // yamux has ended; the control reader says why
			}
			if a.sent != nil {
				close(a.sent)
			}
		}
	}
}

func (s *Session) readControl() {
	for {
		var c wire.Control
		if err := wire.ReadFrame(s.ctl, &c); err != nil {
			if errors.Is(err, wire.ErrFrameSize) {
				s.die(fmt.Errorf("control stream: %w: %w", ErrProtocol, err))
			}
			s.die(nil) // the link or yamux has said why, if it ended
			return
		}
		s.control(c)
	}
}

// control obeys one frame. Unknown kinds are left to newer peers.
func (s *Session) control(c wire.Control) {
	s.mu.Lock()
	defer s.unlock()
	switch c.Kind {
	case wire.ControlPing:
		if s.pongs < maxPongs {
			s.pongs++
			s.sendLocked(action{frame: wire.Control{Kind: wire.ControlPong, ID: c.ID}})
		}
	case wire.ControlPong:
		if ch := s.pings[c.ID]; ch != nil {
			delete(s.pings, c.ID)
			close(ch)
		}
	case wire.ControlReset:
		if st := s.streams[c.Stream]; st != nil {
			st.peerResetLocked(plain(c.Reason))
		}
	case wire.ControlStop:
		if st := s.streams[c.Stream]; st != nil {
			st.peerStopLocked()
		}
	case wire.ControlDrain:
		if s.drained == nil {
			s.drainLocked()
			s.log.Info("peer drains", "reason", plain(c.Reason))
		}
	case wire.ControlBye:
		s.byeCause = fmt.Errorf("the peer said bye: %s", plain(c.Reason))
		s.after = append(s.after, func() { s.die(nil) })
	}
}

// sendPing queues a ping and returns its number; answered is closed by the
// pong, nil asks for no notice.
func (s *Session) sendPing(answered chan struct{}) uint64 {
	s.mu.Lock()
	defer s.unlock()
	s.pingID++
	if answered != nil {
		s.pings[s.pingID] = answered
	}
	s.sendLocked(action{frame: wire.Control{Kind: wire.ControlPing, ID: s.pingID}})
	return s.pingID
}

// Ping measures the time to the peer and back, queues of the link included.
func (s *Session) Ping(ctx context.Context) (time.Duration, error) {
	answered := make(chan struct{})
	start := time.Now()
	id := s.sendPing(answered)
	select {
	case <-answered:
		rtt := time.Since(start)
		s.mu.Lock()
		s.rtt = rtt
		s.mu.Unlock()
		return rtt, nil
	case <-s.dying:
		return 0, fmt.Errorf("ping: %w", s.Err())
	case <-ctx.Done():
		s.mu.Lock()
		delete(s.pings, id)
		s.mu.Unlock()
		return 0, fmt.Errorf("ping: %w", context.Cause(ctx))
	}
}
