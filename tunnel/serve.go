package tunnel

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/hashicorp/yamux"

	"helix.local/helix/agent/wire"
)

// Conn is a connection that can finish writing while reading goes on, as
// *net.TCPConn, *net.UnixConn, *tls.Conn and *Stream can.
type Conn interface {
	net.Conn
	CloseWrite() error
}

// Handler dials what a request names. Its error becomes the open's status: the
// sentinels of this package, *OpenError, the errors of package net and of the
// context are told apart. ctx ends when the gateway gives up or Serve ends.
type Handler func(ctx context.Context, req wire.OpenRequest) (Conn, error)

// Local is what a Handler returns when this program is the upstream: serve gets
// the stream itself, so nothing is copied between. Serve closes the stream when
// serve returns; ctx ends when the stream is reset or the session dies.
func Local(serve func(ctx context.Context, st *Stream)) Conn {
	return &local{serve: serve}
}

// local is never used as a connection, only closed when it is not wanted.
type local struct {
	net.Conn
	serve func(context.Context, *Stream)
}

func (*local) CloseWrite() error { return nil }
func (*local) Close() error      { return nil }

// requestTimeout is how long an opened stream may be silent about what it wants.
const requestTimeout = 10 * time.Second

// Serve answers the gateway's streams until ctx is done, then resets those that
// are open and returns nil. When the session ends first, it returns Err. It is
// to be called once, by the agent.
func (s *Session) Serve(ctx context.Context, h Handler) error {
	if s.side != agentSide {
		return fmt.Errorf("serve: only the agent serves: %w", ErrDenied)
	}
	ctx, cancel := context.WithCancel(ctx)
	var streams sync.WaitGroup
	defer streams.Wait()
	defer cancel()
	for {
		ys, err := s.mux.AcceptStreamWithContext(ctx)
		if ctx.Err() != nil {
			if ys != nil {
				streams.Go(func() { s.serveStream(ctx, ys, h) }) // resets it, ctx being done
			}
			return nil
		}
		if err != nil {
			<-s.dying // yamux ends no other way
			return s.Err()
		}
		streams.Go(func() { s.serveStream(ctx, ys, h) })
	}
}

func (s *Session) serveStream(ctx context.Context, ys *yamux.Stream, h Handler) {
	st := s.attach(ys)
	if st == nil {
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	st.setHook(cancel)
	req, err := st.readRequest(ctx)
	if err != nil {
		s.log.Debug("stream without a request", "stream", st.id, "err", err)
		st.abort("no request")
		return
	}
	up, reply := s.dial(ctx, req, h)
	err = wire.WriteFrame(st, reply)
	if up == nil {
		if err != nil {
			st.abort("refusal not sent")
		}
		_ = st.Close() // never fails
		return
	}
	if err != nil {
		st.abort("answer not sent")
		abort(up, "answer not sent")
		return
	}
	if here, ok := up.(*local); ok {
		here.serve(ctx, st)
		if ctx.Err() != nil {
			st.abort("target stopped serving")
		}
		_ = st.Close() // never fails
		return
	}
	st.setHook(nil)
	if err := Relay(ctx, st, up); err != nil {
		s.log.Debug("stream ended", "stream", st.id, "request", describe(req), "err", err)
	}
}

// readRequest reads the first frame; a request that asks for nothing, or for
// two things, is left for dial to refuse.
func (st *Stream) readRequest(ctx context.Context) (wire.OpenRequest, error) {
	var req wire.OpenRequest
	stop := context.AfterFunc(ctx, func() { st.abort("target stopped serving") })
	defer stop()
	if err := st.SetReadDeadline(time.Now().Add(requestTimeout)); err != nil {
		return req, err
	}
	if err := wire.ReadFrame(st, &req); err != nil {
		return req, err
	}
	return req, st.SetReadDeadline(time.Time{})
}

func (s *Session) dial(ctx context.Context, req wire.OpenRequest, h Handler) (Conn, wire.OpenReply) {
	s.mu.Lock()
	draining, full := s.drained != nil, len(s.streams) > s.limits.MaxStreams
	s.mu.Unlock()
	asked := 0
	for _, set := range []bool{req.Service != "", req.Port != 0, req.Unix != ""} {
		if set {
			asked++
		}
	}
	switch {
	case draining:
		return nil, wire.OpenReply{Status: wire.StatusDraining}
	case full:
		return nil, wire.OpenReply{Status: wire.StatusFailed, Message: ErrTooManyStreams.Error()}
	case asked != 1:
		return nil, wire.OpenReply{Status: wire.StatusFailed, Message: "a request names one service, port or socket"}
	}
	up, err := h(ctx, req)
	if err == nil && up == nil {
		err = errors.New("no upstream")
	}
	if err != nil {
		reply := statusOf(err)
		reply.Message = plain(reply.Message)
		return nil, reply
	}
	return up, wire.OpenReply{Status: wire.StatusOK}
}
