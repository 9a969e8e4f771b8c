package guestnet

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

// maxFrame is the largest Ethernet frame taken from a guest.
const maxFrame = MTU + header.EthernetMinimumSize

// errFrame reports a frame whose length is impossible.
var errFrame = errors.New("frame length out of range")

// readFrame reads one frame into buf: a 32-bit big-endian length, then an
// Ethernet frame (net/stream.c of QEMU).
func readFrame(r io.Reader, buf []byte) ([]byte, error) {
	var size [4]byte
	if _, err := io.ReadFull(r, size[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(size[:])
	if n < header.EthernetMinimumSize || n > uint32(len(buf)) {
		return nil, fmt.Errorf("frame of %d bytes: %w", n, errFrame)
	}
	if _, err := io.ReadFull(r, buf[:n]); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return nil, err
	}
	return buf[:n], nil
}

// link is the card of our side: it joins the stack to the connection that QEMU
// has made. Frames to the guest are written by whoever sends them, so a guest
// that does not read slows its own connections down and nothing else.
type link struct {
	dispatcher atomic.Pointer[stack.NetworkDispatcher]
	mac        tcpip.LinkAddress
	in, out    atomic.Uint64 // bytes, seen from the host

	mu   sync.Mutex // guards what follows and serialises writing
	conn net.Conn
	head [4]byte
}

func (l *link) attach(conn net.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.conn = conn
}

// run passes on the frames of a guest until its connection ends.
func (l *link) run(conn net.Conn) error {
	r := bufio.NewReaderSize(conn, 128<<10)
	buf := make([]byte, maxFrame)
	for {
		frame, err := readFrame(r, buf)
		if err != nil {
			return err
		}
		l.in.Add(uint64(len(frame)))
		proto, ok := l.admit(frame)
		if !ok {
			continue
		}
		d := l.dispatcher.Load()
		if d == nil {
			continue
		}
		pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(frame[header.EthernetMinimumSize:])})
		(*d).DeliverNetworkPacket(proto, pkt)
		pkt.DecRef()
	}
}

// admit lets in what a guest has reason to send: ARP, and IPv4 from its own
// address or from none, while it has none yet. The stack takes every address for
// its own, so ping must be kept to the gateway or it would answer for the world.
func (l *link) admit(frame []byte) (tcpip.NetworkProtocolNumber, bool) {
	eth := header.Ethernet(frame)
	if dst := eth.DestinationAddress(); dst != l.mac && dst != header.EthernetBroadcastAddress {
		return 0, false
	}
	body := frame[header.EthernetMinimumSize:]
	switch eth.Type() {
	case header.ARPProtocolNumber:
		return header.ARPProtocolNumber, true
	case header.IPv4ProtocolNumber:
		ip := header.IPv4(body)
		if !ip.IsValid(len(body)) {
			return 0, false
		}
		src := ip.SourceAddress()
		if src != guestAddr && src != header.IPv4Any {
			return 0, false
		}
		if ip.TransportProtocol() == header.ICMPv4ProtocolNumber && ip.DestinationAddress() != gatewayAddr {
			return 0, false
		}
		return header.IPv4ProtocolNumber, true
	}
	return 0, false
}

// WritePackets implements stack.LinkWriter.
func (l *link) WritePackets(pkts stack.PacketBufferList) (int, tcpip.Error) {
	for i, pkt := range pkts.AsSlice() {
		if err := l.write(pkt); err != nil {
			return i, err
		}
	}
	return pkts.Len(), nil
}

func (l *link) write(pkt *stack.PacketBuffer) tcpip.Error {
	// The stack would also claim the guest's own address as soon as it asks whether
	// somebody has it.
	if arp := header.ARP(pkt.NetworkHeader().Slice()); pkt.NetworkProtocolNumber == header.ARPProtocolNumber &&
		arp.IsValid() && arp.Op() == header.ARPReply && tcpip.AddrFromSlice(arp.ProtocolAddressSender()) != gatewayAddr {
		return nil
	}
	eth := header.Ethernet(pkt.LinkHeader().Push(header.EthernetMinimumSize))
	eth.Encode(&header.EthernetFields{Type: pkt.NetworkProtocolNumber, SrcAddr: l.mac, DstAddr: pkt.EgressRoute.RemoteLinkAddress})
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn == nil {
		return nil // no guest, no cable
	}
	binary.BigEndian.PutUint32(l.head[:], uint32(pkt.Size()))
	frame := append(net.Buffers{l.head[:]}, pkt.AsSlices()...)
	n, err := frame.WriteTo(l.conn)
	l.out.Add(uint64(n))
	if err != nil {
		return &tcpip.ErrClosedForSend{} // run sees the same end and reports it
	}
	return nil
}

// MTU implements stack.LinkEndpoint, like all below.
func (l *link) MTU() uint32 { return MTU }

// SetMTU does nothing: the size was agreed on with the guest.
func (l *link) SetMTU(uint32) {}

// MaxHeaderLength is the room for an Ethernet header.
func (l *link) MaxHeaderLength() uint16 { return header.EthernetMinimumSize }

// LinkAddress is the gateway's hardware address.
func (l *link) LinkAddress() tcpip.LinkAddress { return l.mac }

// SetLinkAddress does nothing: the address is fixed.
func (l *link) SetLinkAddress(tcpip.LinkAddress) {}

// Capabilities says that frames come over a connection that loses nothing, so
// their checksums need no check.
func (l *link) Capabilities() stack.LinkEndpointCapabilities {
	return stack.CapabilityResolutionRequired | stack.CapabilityRXChecksumOffload
}

// Attach joins the stack, or leaves it with nil.
func (l *link) Attach(d stack.NetworkDispatcher) {
	if d == nil {
		l.dispatcher.Store(nil)
		return
	}
	l.dispatcher.Store(&d)
}

// IsAttached reports whether there is a stack.
func (l *link) IsAttached() bool { return l.dispatcher.Load() != nil }

// Wait returns at once: a link has no goroutines.
func (l *link) Wait() {}

// ARPHardwareType is Ethernet.
func (l *link) ARPHardwareType() header.ARPHardwareType { return header.ARPHardwareEther }

// AddHeader does nothing: write adds it.
func (l *link) AddHeader(*stack.PacketBuffer) {}

// ParseHeader does nothing: run has cut it off.
func (l *link) ParseHeader(*stack.PacketBuffer) bool { return true }

// Close does nothing: the connection belongs to Serve.
func (l *link) Close() {}

// SetOnCloseAction does nothing.
func (l *link) SetOnCloseAction(func()) {}
