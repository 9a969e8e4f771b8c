package dnsd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
)

// maxBadReads is how many reads in a row may fail before the socket is given up.
// Single ones are news about earlier answers (ICMP errors, datagrams too long).
const maxBadReads = 100

// packetConn is what a *net.UDPConn has beyond net.PacketConn: reading and writing
// without allocating an address.
type packetConn interface {
	ReadFromUDPAddrPort(b []byte) (int, netip.AddrPort, error)
	WriteToUDPAddrPort(b []byte, addr netip.AddrPort) (int, error)
}

// serveUDP answers datagrams in the order they come. One goroutine does: nothing
// on the way blocks, and reads on one socket exclude each other anyway.
func (s *Server) serveUDP(ctx context.Context, conn net.PacketConn) error {
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	defer func() { _ = conn.Close() }() // a second time when ctx is done
	exchange := s.exchangePacket(conn)
	for bad := 0; bad < maxBadReads; {
		err := exchange()
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil:
			bad = 0
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("answer dns on udp %s: %w", conn.LocalAddr(), err)
		default:
			bad++
			s.log.DebugContext(ctx, "dns datagram not read", "err", err)
		}
	}
	return fmt.Errorf("answer dns on udp %s: %d reads failed in a row", conn.LocalAddr(), maxBadReads)
}

// exchangePacket returns the function that reads one datagram and answers it. It
// reports read errors only: an answer that cannot be sent is one the client asks
// for again.
func (s *Server) exchangePacket(conn net.PacketConn) func() error {
	in, out := make([]byte, 1<<16), make([]byte, 0, maxUDPSize)
	if fast, ok := conn.(packetConn); ok {
		return func() error {
			n, from, err := fast.ReadFromUDPAddrPort(in)
			if err != nil {
				return err
			}
			if out = s.answer(out[:0], in[:n], udpTransport); len(out) > 0 {
				_, _ = fast.WriteToUDPAddrPort(out, from)
			}
			return nil
		}
	}
	return func() error {
		n, from, err := conn.ReadFrom(in)
		if err != nil {
			return err
		}
		if out = s.answer(out[:0], in[:n], udpTransport); len(out) > 0 {
			_, _ = conn.WriteTo(out, from)
		}
		return nil
	}
}
