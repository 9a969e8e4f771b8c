package guestnet

import (
	"bytes"
	"encoding/binary"
	"net"
	"net/netip"
	"testing"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"
)

func hardware(t testing.TB, text string) tcpip.LinkAddress {
	t.Helper()
	mac, err := net.ParseMAC(text)
	if err != nil {
		t.Fatal(err)
	}
	return tcpip.LinkAddress(mac)
}

func framed(frame []byte) []byte {
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(frame))), frame...)
}

// echoFrame is a ping.
func echoFrame(t testing.TB, dst string, src, to tcpip.Address) []byte {
	t.Helper()
	const size = header.IPv4MinimumSize + header.ICMPv4MinimumSize
	frame := make([]byte, header.EthernetMinimumSize+size)
	header.Ethernet(frame).Encode(&header.EthernetFields{SrcAddr: hardware(t, guestMAC), DstAddr: hardware(t, dst), Type: header.IPv4ProtocolNumber})
	ip := header.IPv4(frame[header.EthernetMinimumSize:])
	ip.Encode(&header.IPv4Fields{TotalLength: size, TTL: 64, Protocol: uint8(header.ICMPv4ProtocolNumber), SrcAddr: src, DstAddr: to})
	ip.SetChecksum(^ip.CalculateChecksum())
	echo := header.ICMPv4(ip.Payload())
	echo.SetType(header.ICMPv4Echo)
	echo.SetChecksum(^checksum.Checksum(echo, 0))
	return framed(frame)
}

// arpReply says where the guest is.
func arpReply(t testing.TB) []byte {
	t.Helper()
	frame := make([]byte, header.EthernetMinimumSize+header.ARPSize)
	header.Ethernet(frame).Encode(&header.EthernetFields{SrcAddr: hardware(t, guestMAC), DstAddr: hardware(t, gatewayMAC), Type: header.ARPProtocolNumber})
	a := header.ARP(frame[header.EthernetMinimumSize:])
	a.SetIPv4OverEthernet()
	a.SetOp(header.ARPReply)
	copy(a.HardwareAddressSender(), hardware(t, guestMAC))
	copy(a.ProtocolAddressSender(), guestAddr.AsSlice())
	copy(a.HardwareAddressTarget(), hardware(t, gatewayMAC))
	copy(a.ProtocolAddressTarget(), gatewayAddr.AsSlice())
	return framed(frame)
}

// dial connects and keeps the endpoint.
func (c *tcpConn) dial(t *testing.T, g *guestStack, addr string) {
	t.Helper()
	to := netip.MustParseAddrPort(addr)
	var wq waiter.Queue
	ep, failed := g.stack.NewEndpoint(tcp.ProtocolNumber, ipv4.ProtocolNumber, &wq)
	if failed != nil {
		t.Fatal(failed)
	}
	entry, ready := waiter.NewChannelEntry(waiter.WritableEvents)
	wq.EventRegister(&entry)
	defer wq.EventUnregister(&entry)
	failed = ep.Connect(tcpip.FullAddress{NIC: nicID, Addr: tcpip.AddrFrom4(to.Addr().As4()), Port: to.Port()})
	if _, ok := failed.(*tcpip.ErrConnectStarted); failed != nil && !ok {
		t.Fatal(failed)
	}
	<-ready
	if err := ep.LastError(); err != nil {
		t.Fatal(err)
	}
	c.conn, c.ep = gonet.NewTCPConn(&wq, ep), ep
}

func FuzzReadFrame(f *testing.F) {
	f.Add(framed(bytes.Repeat([]byte{1}, 60)))
	f.Add([]byte{0, 0, 0, 1, 9})
	f.Add([]byte{0xff, 0xff, 0xff, 0xff})
	f.Add(echoFrame(f, gatewayMAC, guestAddr, gatewayAddr))
	f.Add(arpReply(f))
	l := &link{mac: hardware(f, gatewayMAC)}
	f.Fuzz(func(t *testing.T, in []byte) {
		frame, err := readFrame(bytes.NewReader(in), make([]byte, maxFrame))
		if err != nil {
			return
		}
		if again := framed(frame); !bytes.Equal(again, in[:len(again)]) {
			t.Errorf("%x became %x", in, again)
		}
		if _, ok := l.admit(frame); ok && header.Ethernet(frame).Type() == header.IPv4ProtocolNumber {
			src := header.IPv4(frame[header.EthernetMinimumSize:]).SourceAddress()
			if src != guestAddr && src != header.IPv4Any {
				t.Errorf("a packet from %s got in", src)
			}
		}
	})
}

func FuzzDHCP(f *testing.F) {
	f.Add([]byte{})
	f.Add(discover(f, true))
	f.Add(discover(f, false))
	f.Fuzz(func(_ *testing.T, in []byte) {
		_, _ = answerDHCP(in) // it must not panic; what it makes of a message is tested elsewhere
	})
}
