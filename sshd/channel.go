package sshd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode"

	"golang.org/x/crypto/ssh"
)

const (
	maxLine      = 400              // bytes of a text that a client shows
	answerWait   = 20 * time.Second // until a session channel must ask for something
	answerLinger = 3 * time.Second  // that a connection without channels stays open
)

// statusRefused is the exit status of every program that was not run. It is
// what OpenSSH's client uses for its own failures.
const statusRefused = 255

// defaultUser is who a client is when it does not care.
const defaultUser = "helix"

// directTCPIP is the request of RFC 4254, section 7.2.
type directTCPIP struct {
	Host       string
	Port       uint32
	Origin     string
	OriginPort uint32
}

// jump serves the channels of one client of the jump host. Each has its own
// goroutine, so that none waits for another's upstream.
func (s *Server) jump(ctx context.Context, t *transport, user string, chans <-chan ssh.NewChannel) {
	var work sync.WaitGroup
	defer work.Wait()
	route := &router{server: s, user: user}
	defer route.close()
	dialing, stop := context.WithCancel(ctx) // a client that left waits for no upstream
	defer stop()
	var open atomic.Int64
	for nc := range chans {
		if open.Load() >= int64(s.cfg.MaxChannels) {
			_ = nc.Reject(ssh.ResourceShortage, "too many channels are open") // or the client is gone
			continue
		}
		open.Add(1)
		work.Go(func() {
			defer open.Add(-1)
			switch nc.ChannelType() {
			case "direct-tcpip":
				s.forward(ctx, dialing, t, nc)
			case "session":
				if s.cfg.Client == nil || user == defaultUser {
					answer(dialing, nc, "helix: "+s.usage())
					return
				}
				route.serve(dialing, nc)
			case "direct-streamlocal@openssh.com":
				_ = nc.Reject(ssh.Prohibited, "the jump host forwards TCP ports only")
			default:
				_ = nc.Reject(ssh.UnknownChannelType, "unknown channel type")
			}
		})
	}
}

// forward connects a direct-tcpip channel with its upstream. What was sent
// before the client left still reaches the upstream: ctx outlives the client.
func (s *Server) forward(ctx, dialing context.Context, t *transport, nc ssh.NewChannel) {
	var ask directTCPIP
	if err := ssh.Unmarshal(nc.ExtraData(), &ask); err != nil {
		_ = nc.Reject(ssh.ConnectionFailed, "malformed request")
		return
	}
	name, ok := workspaceOf(ask.Host, s.cfg.Zones)
	if !ok || ask.Port == 0 || ask.Port > 65535 {
		_ = nc.Reject(ssh.Prohibited, oneLine(fmt.Sprintf("%s port %d is not a port of a workspace", ask.Host, ask.Port)))
		return
	}
	upstream, err := s.cfg.Dial(dialing, name, uint16(ask.Port))
	if err != nil {
		reason := ssh.ConnectionFailed
		if errors.Is(err, ErrProhibited) {
			reason = ssh.Prohibited
		}
		_ = nc.Reject(reason, oneLine(explain(err)))
		return
	}
	ch, reqs, err := nc.Accept()
	if err != nil {
		_ = upstream.Close() // the client left meanwhile
		return
	}
	c := &channel{Channel: ch, transport: t}
	s.relay(ctx, c, upstream, reqs, name)
}

// relay runs Relay, and ends it Linger after the client has closed the channel.
func (s *Server) relay(ctx context.Context, c *channel, upstream Conn, reqs <-chan *ssh.Request, name string) {
	ctx, cancel := context.WithCancel(ctx)
	var watch sync.WaitGroup
	defer watch.Wait()
	defer func() { _ = c.Close() }() // ends the requests of a living connection
	defer cancel()
	watch.Go(func() {
		ssh.DiscardRequests(reqs) // until the channel is closed
		linger := time.NewTimer(s.cfg.Linger)
		defer linger.Stop()
		select {
		case <-linger.C:
			cancel()
		case <-ctx.Done():
		}
	})
	if err := s.cfg.Relay(ctx, c, upstream); err != nil {
		s.cfg.Log.DebugContext(ctx, "ssh forward ended", "workspace", name, "peer", c.RemoteAddr(), "err", err)
	}
}

// explain is an error with its cure.
func explain(err error) string {
	var h hinter
	if errors.As(err, &h) && h.Hint() != "" {
		return err.Error() + " (" + h.Hint() + ")"
	}
	return err.Error()
}

// oneLine makes text safe to be shown on a terminal as one line.
func oneLine(text string) string {
	text = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, strings.TrimSpace(strings.ToValidUTF8(text, "?")))
	if len(text) > maxLine {
		text = strings.ToValidUTF8(text[:maxLine], "") + "..."
	}
	return text
}

// refuseAll answers every channel with reason, and returns when the client has
// left, ctx is done, or there was no channel for answerLinger.
func refuseAll(ctx context.Context, chans <-chan ssh.NewChannel, reason string) {
	var work sync.WaitGroup
	defer work.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan struct{})
	open := 0
	idle := time.NewTimer(answerLinger)
	defer idle.Stop()
	for {
		select {
		case nc, ok := <-chans:
			if !ok {
				return
			}
			if nc.ChannelType() != "session" {
				_ = nc.Reject(ssh.ConnectionFailed, reason) // or the client is gone
				continue
			}
			open++
			work.Go(func() {
				answer(ctx, nc, "helix: "+reason)
				select {
				case ended <- struct{}{}:
				case <-ctx.Done():
				}
			})
		case <-ended:
			open--
			idle.Reset(answerLinger)
		case <-idle.C:
			if open == 0 {
				return
			}
		}
	}
}

// answer accepts a session channel, ends the first program it asks for with
// line on standard error, and returns when the channel is closed or ctx is done.
func answer(ctx context.Context, nc ssh.NewChannel, line string) {
	ch, reqs, err := nc.Accept()
	if err != nil {
		return // the client is gone
	}
	defer drain(ctx, reqs)
	defer func() { _ = ch.Close() }() // io.EOF when the client was first
	wait := time.NewTimer(answerWait)
	defer wait.Stop()
	end := "\n"
	for {
		var req *ssh.Request
		select {
		case <-ctx.Done():
			return
		case <-wait.C:
			return
		case req = <-reqs:
		}
		if req == nil {
			return
		}
		switch req.Type {
		case "pty-req":
			end = "\r\n" // the client's terminal is raw then
			_ = req.Reply(true, nil)
		case "env":
			_ = req.Reply(true, nil)
		case "shell", "exec", "subsystem":
			status := ssh.Marshal(struct{ Status uint32 }{statusRefused})
			_ = req.Reply(true, nil)
			_, _ = io.WriteString(ch.Stderr(), line+end) // any error here: the client is gone
			_, _ = ch.SendRequest("exit-status", false, status)
			_ = ch.CloseWrite()
			return
		default:
			_ = req.Reply(false, nil)
		}
	}
}

// drain answers what still comes on a channel that is closed from this side:
// unread requests would hold up the whole connection.
func drain(ctx context.Context, reqs <-chan *ssh.Request) {
	for {
		select {
		case req, ok := <-reqs:
			if !ok {
				return
			}
			_ = req.Reply(false, nil)
		case <-ctx.Done():
			return // the connection is being closed
		}
	}
}

// channel is an SSH channel as a Conn.
type channel struct {
	ssh.Channel
	transport *transport
	finished  atomic.Bool // this side has sent its end
}

// Read returns io.EOF for the client's own end. An end that is only the death of
// the connection is an error, unless this side had nothing more to send: then
// the client had no reason to stay.
func (c *channel) Read(p []byte) (int, error) {
	n, err := c.Channel.Read(p)
	if errors.Is(err, io.EOF) && c.transport.dead.Load() && !c.finished.Load() {
		return n, fmt.Errorf("read ssh channel: %w", io.ErrUnexpectedEOF)
	}
	return n, err
}

// Write fails with net.ErrClosed when the client has closed the channel.
func (c *channel) Write(p []byte) (int, error) {
	n, err := c.Channel.Write(p)
	if errors.Is(err, io.EOF) {
		err = fmt.Errorf("write ssh channel: %w", net.ErrClosed)
	}
	return n, err
}

// CloseWrite sends the end of this side's data.
func (c *channel) CloseWrite() error {
	c.finished.Store(true)
	return c.Channel.CloseWrite()
}

// Close closes both directions. It is no error when the client was first.
func (c *channel) Close() error {
	if err := c.Channel.Close(); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	return nil
}

// Reset closes the channel without an end of data: SSH has no harder way.
func (c *channel) Reset(string) error { return c.Close() }

func (c *channel) LocalAddr() net.Addr  { return c.transport.LocalAddr() }
func (c *channel) RemoteAddr() net.Addr { return c.transport.RemoteAddr() }

// SetDeadline fails: a channel has none. Closing it ends a blocked call.
func (c *channel) SetDeadline(time.Time) error      { return os.ErrNoDeadline }
func (c *channel) SetReadDeadline(time.Time) error  { return os.ErrNoDeadline }
func (c *channel) SetWriteDeadline(time.Time) error { return os.ErrNoDeadline }
