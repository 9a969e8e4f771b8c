package session

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync"
	"time"

	gossh "golang.org/x/crypto/ssh"
)

// closeWriter is a connection that can be half closed: *net.TCPConn, *net.UnixConn.
type closeWriter interface {
	net.Conn
	CloseWrite() error
}

func dialTCP(ctx context.Context, host string, port uint16) (net.Conn, error) {
	dialer := net.Dialer{Timeout: 30 * time.Second}
	return dialer.DialContext(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(int(port)))) //nolint:wrapcheck // names the address
}

// serveDirectTCP serves ssh -L, -W, -D and -J.
func (c *connection) serveDirectTCP(conn *gossh.ServerConn, channel gossh.NewChannel) {
	var p directTCP
	if err := gossh.Unmarshal(channel.ExtraData(), &p); err != nil {
		_ = channel.Reject(gossh.ConnectionFailed, errPayload.Error()) // fails only with the connection
		return
	}
	port, err := parsePort(p.Port)
	var upstream net.Conn
	if err == nil {
		upstream, err = c.srv.cfg.DialTCP(c.ctx, p.Host, port)
	}
	c.serveDirect(conn, channel, upstream, err)
}

// serveDirectUnix serves ssh -L with a socket in the target.
func (c *connection) serveDirectUnix(conn *gossh.ServerConn, channel gossh.NewChannel) {
	var p directUnix
	if err := gossh.Unmarshal(channel.ExtraData(), &p); err != nil {
		_ = channel.Reject(gossh.ConnectionFailed, errPayload.Error()) // as above
		return
	}
	var dialer net.Dialer
	upstream, err := dialer.DialContext(c.ctx, "unix", p.Path)
	c.serveDirect(conn, channel, upstream, err)
}

func (c *connection) serveDirect(conn *gossh.ServerConn, newChannel gossh.NewChannel, upstream net.Conn, err error) {
	if err != nil {
		_ = newChannel.Reject(gossh.ConnectionFailed, err.Error()) // as above
		return
	}
	ch, requests, err := newChannel.Accept()
	if err != nil {
		_ = upstream.Close() // nothing was exchanged
		return
	}
	c.relay(conn, ch, requests, upstream)
}

// relay copies both ways until both have ended. A half-close passes on. A dead
// SSH connection must not look like the end of the data: upstream is reset.
func (c *connection) relay(conn gossh.Conn, ch gossh.Channel, requests <-chan *gossh.Request, upstream net.Conn) {
	defer func() { _ = ch.Close() }() // may be closed by the client
	defer func() { _ = upstream.Close() }()
	var both sync.WaitGroup
	toUpstream := make(chan struct{})
	both.Go(func() {
		defer close(toUpstream)
		_, err := io.CopyBuffer(struct{ io.Writer }{upstream}, struct{ io.Reader }{ch}, make([]byte, copyBuffer))
		switch half, ok := upstream.(closeWriter); {
		case err != nil: // upstream takes no more
			_ = ch.Close()
		case c.dead(conn):
			reset(upstream)
		case ok:
			_ = half.CloseWrite() // it may have ended already
		}
	})
	both.Go(func() {
		_, err := io.CopyBuffer(struct{ io.Writer }{ch}, struct{ io.Reader }{upstream}, make([]byte, copyBuffer))
		if err != nil { // SSH has no reset; closing without EOF is the nearest
			_ = ch.Close()
			return
		}
		_ = ch.CloseWrite() // the client may be gone
	})
	over := make(chan struct{})
	go func() { // ends with the channel
		defer close(over)
		gossh.DiscardRequests(requests)
		<-toUpstream
		_ = upstream.Close() // the client closed the channel: it wants no more from upstream
	}()
	both.Wait()
	_ = ch.Close()
	<-over
}

// dead reports whether the connection below conn is gone, which x/crypto/ssh
// shows to readers as a plain EOF. A request without reply tells: it can be
// written or it cannot.
func (c *connection) dead(conn gossh.Conn) bool {
	_, _, err := conn.SendRequest("keepalive@openssh.com", false, nil)
	return err != nil
}

// reset closes conn so that its peer sees an abort where the protocol has one.
func reset(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0) // fails only on a closed socket
	}
	_ = conn.Close()
}

// closeListener ends a listener; its accept loop ends with it.
func (c *connection) closeListener(ln net.Listener) {
	if err := ln.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		c.srv.log.Warn("listener not closed", "err", err)
	}
}

// listen registers ln under key and serves it until it is closed: open makes the
// channel for a connection.
func (c *connection) listen(key string, ln net.Listener, conn gossh.Conn, kind string, payload func(net.Conn) []byte) error {
	c.mu.Lock()
	_, taken := c.forwards[key]
	if !taken && !c.ended {
		c.forwards[key] = ln
	}
	ended := c.ended
	c.mu.Unlock()
	if taken || ended || !c.spawn(func() { c.acceptForwarded(ln, conn, kind, payload) }) {
		_ = ln.Close() // never served
		return fmt.Errorf("listen on %s: %w", ln.Addr(), errors.ErrUnsupported)
	}
	return nil
}

func (c *connection) acceptForwarded(ln net.Listener, conn gossh.Conn, kind string, payload func(net.Conn) []byte) {
	for {
		accepted, err := ln.Accept()
		if err != nil {
			if !errors.Is(err, net.ErrClosed) {
				c.srv.log.Warn("forward ended", "err", err)
			}
			return
		}
		if !c.spawn(func() { c.serveForwarded(accepted, conn, kind, payload(accepted)) }) {
			reset(accepted)
		}
	}
}

// serveForwarded carries one accepted connection to the client.
func (c *connection) serveForwarded(accepted net.Conn, conn gossh.Conn, kind string, payload []byte) {
	ch, requests, err := conn.OpenChannel(kind, payload)
	if err != nil { // the client cannot reach its end, or is gone
		reset(accepted)
		return
	}
	c.relay(conn, ch, requests, accepted)
}

func (c *connection) cancel(key string) bool {
	c.mu.Lock()
	ln, ok := c.forwards[key]
	delete(c.forwards, key)
	c.mu.Unlock()
	if ok {
		c.closeListener(ln)
	}
	return ok
}
