package dnsd

import (
	"bufio"
	"container/list"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

// limits bound what TCP clients can hold.
type limits struct {
	conns int           // open connections of one listener
	read  time.Duration // from the end of one question to the end of the next
	write time.Duration // for one answer
	retry time.Duration // after a failed accept
}

var defaultLimits = limits{conns: 256, read: 10 * time.Second, write: 5 * time.Second, retry: 50 * time.Millisecond}

// roster holds the open connections, the one that asked longest ago first. When
// it is full that one is closed: whoever only holds connections cannot keep those
// out who ask.
type roster struct {
	limit int

	mu    sync.Mutex
	conns *list.List // of net.Conn
}

func (r *roster) add(c net.Conn) *list.Element {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.conns.Len() >= r.limit {
		oldest := r.conns.Front()
		_ = oldest.Value.(net.Conn).Close() // its goroutine sees the error and ends
		r.conns.Remove(oldest)
	}
	return r.conns.PushBack(c)
}

func (r *roster) asked(e *list.Element) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.conns.MoveToBack(e)
}

func (r *roster) remove(e *list.Element) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.conns.Remove(e)
}

// serveTCP accepts connections until ctx is done.
func (s *Server) serveTCP(ctx context.Context, ln net.Listener) error {
	stop := context.AfterFunc(ctx, func() { _ = ln.Close() })
	defer stop()
	defer func() { _ = ln.Close() }() // a second time when ctx is done
	// A context of their own for the connections, which end also when ln fails. Only
	// the outer one tells a stop: the inner ends a moment after ln was closed.
	serving, cancel := context.WithCancel(ctx)
	open := &roster{limit: s.limits.conns, conns: list.New()}
	var conns sync.WaitGroup
	defer conns.Wait()
	defer cancel()
	for {
		c, err := ln.Accept()
		switch {
		case ctx.Err() != nil:
			if err == nil {
				_ = c.Close()
			}
			return nil
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("answer dns on tcp %s: %w", ln.Addr(), err)
		case err != nil: // out of descriptors, or a client that left at once
			s.log.WarnContext(ctx, "dns connection not accepted", "err", err)
			select {
			case <-ctx.Done():
			case <-time.After(s.limits.retry):
			}
		default:
			place := open.add(c)
			conns.Go(func() {
				defer open.remove(place)
				s.serveConn(serving, c, func() { open.asked(place) })
			})
		}
	}
}

// serveConn answers the questions of one connection in their order until the
// client is done, slow or wrong. It closes c.
func (s *Server) serveConn(ctx context.Context, c net.Conn, asked func()) {
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer stop()
	defer func() { _ = c.Close() }() // nothing is left to be lost
	in := bufio.NewReader(c)
	var question, answer []byte
	for {
		// One deadline for a whole question: bytes that trickle in do not extend it.
		if err := c.SetReadDeadline(time.Now().Add(s.limits.read)); err != nil {
			return
		}
		var size [2]byte
		if _, err := io.ReadFull(in, size[:]); err != nil {
			return
		}
		n := int(binary.BigEndian.Uint16(size[:]))
		if cap(question) < n {
			question = make([]byte, n)
		}
		if _, err := io.ReadFull(in, question[:n]); err != nil {
			return
		}
		asked()
		answer = s.answer(append(answer[:0], 0, 0), question[:n], tcpTransport)
		if len(answer) == 2 {
			return // what is dropped as a datagram ends a connection
		}
		binary.BigEndian.PutUint16(answer, uint16(len(answer)-2))
		if err := c.SetWriteDeadline(time.Now().Add(s.limits.write)); err != nil {
			return
		}
		if _, err := c.Write(answer); err != nil {
			return
		}
	}
}
