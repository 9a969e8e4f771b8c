package guestnet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
	"gvisor.dev/gvisor/pkg/waiter"
)

// maxLinks is how many connections a guest may have to its gateway's process at
// once. The agent needs one, and a second while it comes back.
const maxLinks = 8

var linkAddr = netip.MustParseAddrPort(LinkAddr)

// dial connects to where a guest wants to go. The check runs on the address the
// socket is really connected to, after anything that could have changed it.
func (n *Network) dial(ctx context.Context, network string, to netip.AddrPort) (net.Conn, error) {
	if to.Addr() == netip.AddrFrom4(gatewayAddr.As4()) {
		if network == "tcp4" && to == linkAddr && n.cfg.Link != "" {
			return (&net.Dialer{Timeout: n.cfg.DialTime}).DialContext(ctx, "unix", n.cfg.Link)
		}
		return nil, syscall.ECONNREFUSED
	}
	if at, ok := n.divert(to); ok {
		return (&net.Dialer{Timeout: n.cfg.DialTime}).DialContext(ctx, network, at.String())
	}
	dialer := net.Dialer{
		Timeout: n.cfg.DialTime,
		Control: func(_, address string, _ syscall.RawConn) error {
			final, err := netip.ParseAddrPort(address)
			if err != nil {
				return fmt.Errorf("%s: %w", address, ErrDenied)
			}
			return n.rules.check(final.Addr())
		},
	}
	return dialer.DialContext(ctx, network, to.String())
}

func (n *Network) divert(to netip.AddrPort) (netip.AddrPort, bool) {
	if n.cfg.Divert == nil {
		return to, false
	}
	return n.cfg.Divert(to)
}

// target is where the guest wants to go: its packets' destination is local to us.
func target(id stack.TransportEndpointID) netip.AddrPort {
	addr, _ := netip.AddrFromSlice(id.LocalAddress.AsSlice())
	return netip.AddrPortFrom(addr, id.LocalPort)
}

// acceptTCP answers a SYN: with a RST when the far side cannot be reached, and
// with the handshake only after the far side has accepted. The stack calls it in
// a goroutine of its own.
func (n *Network) acceptTCP(r *tcp.ForwarderRequest) {
	if n.tcpOpen.Load() >= maxTCP || !n.begin() {
		r.Complete(true)
		return
	}
	defer n.flows.Done()
	n.tcpOpen.Add(1)
	defer n.tcpOpen.Add(-1)
	n.tcpTotal.Add(1)
	to := target(r.ID())
	if to == linkAddr {
		defer n.links.Add(-1)
		if n.links.Add(1) > maxLinks {
			r.Complete(true)
			return
		}
	}
	upstream, err := n.dial(n.ctx, "tcp4", to)
	if err != nil {
		if errors.Is(err, ErrDenied) {
			n.refuse("tcp", to, err)
		}
		r.Complete(true)
		return
	}
	var wq waiter.Queue
	ep, failed := r.CreateEndpoint(&wq)
	r.Complete(false)
	if failed != nil {
		_ = upstream.Close() // the guest has given up meanwhile
		return
	}
	ep.SocketOptions().SetDelayOption(false)
	relay(n.ctx, guestConn{gonet.NewTCPConn(&wq, ep), ep}, upstream)
}

// guestConn is the guest's side of a connection.
type guestConn struct {
	*gonet.TCPConn
	ep tcpip.Endpoint
}

func (c guestConn) reset() { c.ep.Abort() }

// resetConn ends a connection with a RST where its kind has one.
func resetConn(c net.Conn) {
	switch c := c.(type) {
	case guestConn:
		c.reset()
	case *net.TCPConn:
		_ = c.SetLinger(0) // a socket that is already dead has nothing to reset
	}
	_ = c.Close() // both ways are over, the error was seen where it arose
}

// halfCloser is a connection whose sending side can end alone.
type halfCloser interface{ CloseWrite() error }

// relay copies both ways until both have ended. An end is passed on as an end, an
// error as a reset of the other side.
func relay(ctx context.Context, a, b net.Conn) {
	stop := context.AfterFunc(ctx, func() { resetConn(a); resetConn(b) })
	defer stop()
	var once sync.Once
	abort := func() { once.Do(func() { resetConn(a); resetConn(b) }) }
	copyWay := func(dst, src net.Conn) {
		buf := copyBuffers.Get().(*[]byte)
		defer copyBuffers.Put(buf)
		_, err := io.CopyBuffer(onlyWriter{dst}, onlyReader{src}, *buf)
		if err == nil {
			if half, ok := dst.(halfCloser); ok {
				err = half.CloseWrite()
			}
		}
		if err != nil {
			abort()
		}
	}
	var both sync.WaitGroup
	both.Go(func() { copyWay(a, b) })
	copyWay(b, a)
	both.Wait()
	_ = a.Close() // both ways have ended
	_ = b.Close() // likewise
}

// copyBuffers are shared by all flows; a flow holds one a way. It is no registry:
// what it holds has no meaning.
var copyBuffers = sync.Pool{New: func() any { b := make([]byte, 64<<10); return &b }}

// The wrappers keep io.CopyBuffer from choosing another way of copying, which
// would use smaller buffers.
type (
	onlyWriter struct{ io.Writer }
	onlyReader struct{ io.Reader }
)

// admitUDP decides before a flow is made, so that a refused datagram is answered.
func (n *Network) admitUDP(id stack.TransportEndpointID) bool {
	to := target(id)
	if to.Addr() == netip.AddrFrom4(gatewayAddr.As4()) || id.RemoteAddress != guestAddr {
		return false
	}
	if _, ok := n.divert(to); !ok {
		if err := n.rules.check(to.Addr()); err != nil {
			n.refuse("udp", to, err)
			return false
		}
	}
	return n.udpOpen.Load() < maxUDP
}

// acceptUDP starts the flow of a first datagram. It runs in the goroutine that
// reads the guest's frames and must not wait.
func (n *Network) acceptUDP(r *udp.ForwarderRequest) {
	var wq waiter.Queue
	ep, failed := r.CreateEndpoint(&wq)
	if failed != nil {
		n.log.Debug("udp flow not made", "err", failed.String())
		return
	}
	guest := gonet.NewUDPConn(&wq, ep)
	to := target(r.ID())
	if !n.flow(func() { n.serveUDP(guest, to) }) {
		_ = guest.Close() // the network is closing
	}
}

// serveUDP carries the datagrams of one flow until both ways are silent for the
// idle time.
func (n *Network) serveUDP(guest net.Conn, to netip.AddrPort) {
	defer guest.Close()
	n.udpOpen.Add(1)
	defer n.udpOpen.Add(-1)
	n.udpTotal.Add(1)
	upstream, err := n.dial(n.ctx, "udp4", to)
	if err != nil {
		if errors.Is(err, ErrDenied) {
			n.refuse("udp", to, err)
		}
		return
	}
	defer upstream.Close()
	stop := context.AfterFunc(n.ctx, func() { _ = guest.Close(); _ = upstream.Close() })
	defer stop()
	idle := newIdle(n.cfg.UDPIdle)
	var back sync.WaitGroup
	back.Go(func() {
		copyDatagrams(guest, upstream, idle)
		_ = guest.Close() // wakes the other way
	})
	copyDatagrams(upstream, guest, idle)
	_ = upstream.Close() // wakes the way back
	back.Wait()
}

// idle is the time at which a flow counts as over, shared by both ways.
type idle struct {
	mu    sync.Mutex
	after time.Duration
	last  time.Time
}

func newIdle(after time.Duration) *idle { return &idle{after: after, last: time.Now()} }

func (i *idle) touch() {
	i.mu.Lock()
	i.last = time.Now()
	i.mu.Unlock()
}

func (i *idle) deadline() time.Time {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.last.Add(i.after)
}

func copyDatagrams(dst, src net.Conn, idle *idle) {
	buf := make([]byte, 64<<10)
	for {
		if err := src.SetReadDeadline(idle.deadline()); err != nil {
			return
		}
		n, err := src.Read(buf)
		if errors.Is(err, os.ErrDeadlineExceeded) || isTimeout(err) {
			if time.Now().Before(idle.deadline()) {
				continue // the other way was busy meanwhile
			}
			return
		}
		if errors.Is(err, syscall.ECONNREFUSED) {
			continue // an ICMP message about an earlier datagram
		}
		if err != nil {
			return
		}
		idle.touch()
		if _, err := dst.Write(buf[:n]); err != nil && !errors.Is(err, syscall.ECONNREFUSED) {
			return
		}
	}
}

func isTimeout(err error) bool {
	var t interface{ Timeout() bool }
	return errors.As(err, &t) && t.Timeout()
}
