package front

import (
	"context"
	"io"
	"net"
	"time"
)

// Conn is a connection whose two directions end apart.
type Conn interface {
	net.Conn
	CloseWrite() error
}

// Dial opens the far side of a connection.
type Dial func(ctx context.Context) (Conn, error)

// keepAlive finds clients that are gone without a word after about a minute.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 30 * time.Second, Interval: 10 * time.Second, Count: 3}

// promptReads is how many reads of a Prompt connection acknowledge at once: more
// than an SSH client needs to log in and run a command.
const promptReads = 64

// Prompt makes the kernel acknowledge what c receives at once, for as long as a
// handshake takes. SSH handshakes are small packets in strict turns: delayed
// acknowledgements are most of their time. The kernel forgets the wish after a
// while, so it is renewed with each read.
func Prompt(c *net.TCPConn) Conn { return &prompt{TCPConn: c, left: promptReads} }

type prompt struct {
	*net.TCPConn
	left int // reads; there is one reader
}

func (p *prompt) Read(b []byte) (int, error) {
	if p.left > 0 {
		p.left--
		_ = quickAck(p.TCPConn) // slower without
	}
	return p.TCPConn.Read(b)
}

// Reset closes c so that the peer sees a reset. A plain socket cannot refuse a
// connection it has accepted; this is the nearest thing.
func Reset(c net.Conn) error {
	if l, ok := c.(interface{ SetLinger(int) error }); ok {
		if err := l.SetLinger(0); err != nil {
			_ = c.Close() // the peer sees an end, which is wrong but better than a hang
			return err
		}
	}
	return c.Close()
}

// peeked is a TCP connection of which some bytes were read already. It does
// not embed the TCP connection: its WriteTo and File would pass them by.
type peeked struct {
	net.Conn
	head []byte
}

// Read gives the bytes that were read before, then the connection's.
func (c *peeked) Read(p []byte) (int, error) {
	if len(c.head) == 0 {
		return c.Conn.Read(p)
	}
	n := copy(p, c.head)
	c.head = c.head[n:]
	return n, nil
}

// CloseWrite ends this side's direction.
func (c *peeked) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return c.Conn.Close()
}

// SetLinger is the TCP connection's.
func (c *peeked) SetLinger(sec int) error {
	if l, ok := c.Conn.(interface{ SetLinger(int) error }); ok {
		return l.SetLinger(sec)
	}
	return nil
}

// ReadFrom lets the kernel move the bytes where it can.
func (c *peeked) ReadFrom(r io.Reader) (int64, error) { return io.Copy(c.Conn, r) }
