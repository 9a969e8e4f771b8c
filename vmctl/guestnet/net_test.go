package guestnet

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/channel"
	"gvisor.dev/gvisor/pkg/tcpip/link/ethernet"
	"gvisor.dev/gvisor/pkg/tcpip/network/arp"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const guestMAC = "52:48:00:00:00:02"

// outside is an address that the tests divert to their own servers.
var outside = netip.MustParseAddr("198.51.100.7")

// guestStack is a second TCP/IP stack in the place of a guest.
type guestStack struct {
	t     *testing.T
	stack *stack.Stack
}

// pipe returns both ends of a stream socket, as QEMU uses one.
func pipe(t *testing.T) (a, b net.Conn) {
	t.Helper()
	ln, err := net.Listen("unix", filepath.Join(t.TempDir(), "n"))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	if a, err = net.Dial("unix", ln.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if b, err = ln.Accept(); err != nil {
		t.Fatal(err)
	}
	return a, b
}

// plug starts a network and returns the guest's end of its cable.
func plug(t *testing.T, cfg Config) (*Network, net.Conn) {
	t.Helper()
	n, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs := pipe(t)
	ctx, cancel := context.WithCancel(t.Context())
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := n.Serve(ctx, ours); err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	t.Cleanup(func() {
		cancel()
		_ = theirs.Close()
		serving.Wait()
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return n, theirs
}

// divertTo sends everything for the outside address to at.
func divertTo(at net.Addr) func(netip.AddrPort) (netip.AddrPort, bool) {
	return func(to netip.AddrPort) (netip.AddrPort, bool) {
		return netip.MustParseAddrPort(at.String()), to.Addr() == outside
	}
}

func newGuest(t *testing.T, cfg Config) (*Network, *guestStack) {
	t.Helper()
	n, conn := plug(t, cfg)
	mac, err := net.ParseMAC(guestMAC)
	if err != nil {
		t.Fatal(err)
	}
	ep := channel.New(1024, MTU, tcpip.LinkAddress(mac))
	s := stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, arp.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol, icmp.NewProtocol4},
	})
	addr := tcpip.ProtocolAddress{Protocol: ipv4.ProtocolNumber, AddressWithPrefix: tcpip.AddressWithPrefix{Address: guestAddr, PrefixLen: 24}}
	for _, err := range []tcpip.Error{s.CreateNIC(nicID, ethernet.New(ep)), s.AddProtocolAddress(nicID, addr, stack.AddressProperties{})} {
		if err != nil {
			t.Fatal(err)
		}
	}
	s.SetRouteTable([]tcpip.Route{
		{Destination: addr.AddressWithPrefix.Subnet(), NIC: nicID},
		{Destination: header.IPv4EmptySubnet, Gateway: gatewayAddr, NIC: nicID},
	})
	ctx, cancel := context.WithCancel(t.Context())
	var pumps sync.WaitGroup
	pumps.Go(func() {
		for {
			pkt := ep.ReadContext(ctx)
			if pkt == nil {
				return
			}
			frame := pkt.ToView().AsSlice()
			_, err := conn.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(frame))), frame...))
			pkt.DecRef()
			if err != nil {
				return
			}
		}
	})
	pumps.Go(func() {
		r, buf := bufio.NewReader(conn), make([]byte, maxFrame)
		for {
			frame, err := readFrame(r, buf)
			if err != nil {
				return
			}
			pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(frame)})
			ep.InjectInbound(0, pkt)
			pkt.DecRef()
		}
	})
	t.Cleanup(func() {
		cancel()
		_ = conn.Close()
		pumps.Wait()
		s.Close()
		s.Wait()
	})
	return n, &guestStack{t, s}
}

func (g *guestStack) dial(addr string) (*gonet.TCPConn, error) {
	to := netip.MustParseAddrPort(addr)
	ctx, cancel := context.WithTimeout(g.t.Context(), 20*time.Second)
	defer cancel()
	conn, err := gonet.DialContextTCP(ctx, g.stack, tcpip.FullAddress{NIC: nicID, Addr: tcpip.AddrFrom4(to.Addr().As4()), Port: to.Port()}, ipv4.ProtocolNumber)
	if err != nil {
		return nil, err
	}
	g.t.Cleanup(func() { _ = conn.Close() })
	return conn, conn.SetDeadline(time.Now().Add(20 * time.Second))
}

func (g *guestStack) dialUDP(addr string) net.Conn {
	g.t.Helper()
	to := netip.MustParseAddrPort(addr)
	conn, err := gonet.DialUDP(g.stack, nil, &tcpip.FullAddress{NIC: nicID, Addr: tcpip.AddrFrom4(to.Addr().As4()), Port: to.Port()}, ipv4.ProtocolNumber)
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() { _ = conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		g.t.Fatal(err)
	}
	return conn
}

// listen serves each connection with f until the test ends.
func listen(t *testing.T, network, addr string, f func(net.Conn)) net.Addr {
	t.Helper()
	ln, err := net.Listen(network, addr)
	if err != nil {
		t.Fatal(err)
	}
	var conns sync.WaitGroup
	conns.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			conns.Go(func() {
				defer c.Close()
				f(c)
			})
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		conns.Wait()
	})
	return ln.Addr()
}

// sumServer answers the checksum of what it got, once the sender has finished.
func sumServer(c net.Conn) {
	h := sha256.New()
	n, err := io.Copy(h, c)
	if err != nil {
		return
	}
	fmt.Fprintf(c, "%d %x", n, h.Sum(nil))
}

func TestHalfClose(t *testing.T) {
	link := filepath.Join(t.TempDir(), "link.sock")
	listen(t, "unix", link, sumServer)
	n, g := newGuest(t, Config{Policy: PolicyInternet, Link: link, Divert: divertTo(listen(t, "tcp", "127.0.0.1:0", sumServer))})
	body := bytes.Repeat([]byte("0123456789abcdef"), 256<<10/4)
	want := fmt.Sprintf("%d %x", len(body), sha256.Sum256(body))
	for _, addr := range []string{outside.String() + ":80", LinkAddr} {
		conn, err := g.dial(addr)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Write(body); err != nil {
			t.Fatal(err)
		}
		if err := conn.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(conn)
		if err != nil || string(got) != want {
			t.Errorf("%s: got %q, %v, want %q", addr, got, err, want)
		}
	}
	if st := n.Status(); st.TCPTotal != 2 || !st.Cable || !st.Link || st.BytesIn < uint64(2*len(body)) {
		t.Errorf("status is %+v", st)
	}
}

func TestServerClosesFirst(t *testing.T) {
	got := make(chan int64, 1)
	addr := listen(t, "tcp", "127.0.0.1:0", func(c net.Conn) {
		if _, err := io.WriteString(c, "bye"); err != nil {
			return
		}
		_ = c.(*net.TCPConn).CloseWrite()
		n, _ := io.Copy(io.Discard, c)
		got <- n
	})
	_, g := newGuest(t, Config{Policy: PolicyInternet, Divert: divertTo(addr)})
	conn, err := g.dial(outside.String() + ":80")
	if err != nil {
		t.Fatal(err)
	}
	if text, err := io.ReadAll(conn); err != nil || string(text) != "bye" {
		t.Fatalf("got %q, %v", text, err)
	}
	if _, err := conn.Write(make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}
	if err := conn.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if n := <-got; n != 1<<20 {
		t.Errorf("server got %d bytes after its end, want %d", n, 1<<20)
	}
}

func TestResetsArePassedOn(t *testing.T) {
	seen := make(chan error, 1)
	addr := listen(t, "tcp", "127.0.0.1:0", func(c net.Conn) {
		buf := make([]byte, 1)
		if _, err := io.ReadFull(c, buf); err != nil {
			seen <- err
			return
		}
		if buf[0] == 'r' {
			_ = c.(*net.TCPConn).SetLinger(0)
			return
		}
		if _, err := c.Write(buf); err != nil {
			seen <- err
			return
		}
		_, err := c.Read(buf)
		seen <- err
	})
	_, g := newGuest(t, Config{Policy: PolicyInternet, Divert: divertTo(addr)})
	conn, err := g.dial(outside.String() + ":80")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Write([]byte("r")); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("reset of the server reads as %v", err)
	}
	var wq tcpConn
	wq.dial(t, g, outside.String()+":80")
	if _, err := wq.conn.Write([]byte("w")); err != nil {
		t.Fatal(err)
	}
	// A reset may overtake data, so the server says that it has the byte.
	if _, err := wq.conn.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	wq.ep.SocketOptions().SetLinger(tcpip.LingerOption{Enabled: true})
	_ = wq.conn.Close()
	if err := <-seen; !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("reset of the guest reads as %v", err)
	}
}

func TestRefusals(t *testing.T) {
	closed := listen(t, "tcp", "127.0.0.1:0", func(net.Conn) {})
	n, g := newGuest(t, Config{Policy: PolicyInternet, Divert: func(to netip.AddrPort) (netip.AddrPort, bool) {
		return netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), 1), to.Addr() == outside // nobody listens on port 1
	}})
	for _, addr := range []string{
		"10.0.0.1:80", "192.168.1.1:22", "169.254.169.254:80", "172.16.0.1:1", "100.64.0.1:1", "10.188.0.1:22",
		"10.188.0.1:4580", "198.18.0.1:80", "240.0.0.1:80", outside.String() + ":80",
	} {
		begin := time.Now()
		if _, err := g.dial(addr); err == nil || !strings.Contains(err.Error(), "refused") {
			t.Errorf("dial %s gave %v", addr, err)
		}
		if took := time.Since(begin); took > 5*time.Second {
			t.Errorf("dial %s was refused only after %v", addr, took)
		}
	}
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for n.Status().TCPOpen != 0 { // a connection counts until after its reset is out
		<-tick.C
	}
	if st := n.Status(); st.Refused != 7 || !strings.Contains(st.Last, "240.0.0.1") {
		t.Errorf("status is %+v", st)
	}
	// The same address without a diversion: the check is on what is dialled.
	if _, err := n.dial(t.Context(), "tcp4", netip.MustParseAddrPort(closed.String())); !errors.Is(err, ErrDenied) {
		t.Errorf("dial of the host's loopback gave %v", err)
	}
	if _, err := g.dialUDP("10.0.0.1:53").Write([]byte("x")); err != nil {
		t.Error(err)
	}
	for n.Status().Refused < 8 {
		<-tick.C
	}
	if st := n.Status(); st.UDPTotal != 0 || st.Last != "udp 10.0.0.1:53" {
		t.Errorf("status is %+v", st)
	}
}

func TestUDPFlow(t *testing.T) {
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var echo sync.WaitGroup
	echo.Go(func() {
		buf := make([]byte, 64<<10)
		for {
			n, from, err := pc.ReadFrom(buf)
			if err != nil {
				return
			}
			if _, err := pc.WriteTo(buf[:n], from); err != nil {
				return
			}
		}
	})
	defer echo.Wait()
	defer pc.Close()
	n, g := newGuest(t, Config{Policy: PolicyInternet, UDPIdle: 150 * time.Millisecond, Divert: divertTo(pc.LocalAddr())})
	for range 2 { // the second flow begins after the first has ended
		conn := g.dialUDP(outside.String() + ":7")
		for _, size := range []int{1, 1400, 9000, 40000} {
			out := bytes.Repeat([]byte{byte(size)}, size)
			if _, err := conn.Write(out); err != nil {
				t.Fatal(err)
			}
			in := make([]byte, 64<<10)
			got, err := conn.Read(in)
			if err != nil || !bytes.Equal(in[:got], out) {
				t.Fatalf("echo of %d bytes gave %d, %v", size, got, err)
			}
		}
		tick := time.NewTicker(10 * time.Millisecond)
		for n.Status().UDPOpen > 0 {
			<-tick.C
		}
		tick.Stop()
	}
	if st := n.Status(); st.UDPTotal < 2 {
		t.Errorf("status is %+v", st)
	}
}

func TestPolicyNone(t *testing.T) {
	link := filepath.Join(t.TempDir(), "link.sock")
	listen(t, "unix", link, sumServer)
	n, g := newGuest(t, Config{Link: link})
	if _, err := g.dial("1.1.1.1:80"); err == nil {
		t.Error("a public address was reached")
	}
	if conn, err := g.dial(LinkAddr); err != nil {
		t.Errorf("fast link: %v", err)
	} else if err := conn.Close(); err != nil {
		t.Error(err)
	}
	if st := n.Status(); st.Policy != PolicyNone || st.Refused != 1 {
		t.Errorf("status is %+v", st)
	}
}

func TestCloseEndsOpenFlows(t *testing.T) {
	addr := listen(t, "tcp", "127.0.0.1:0", func(c net.Conn) { _, _ = io.Copy(io.Discard, c) })
	n, g := newGuest(t, Config{Policy: PolicyInternet, Divert: divertTo(addr)})
	if _, err := g.dial(outside.String() + ":80"); err != nil {
		t.Fatal(err)
	}
	if err := n.Close(); err != nil {
		t.Error(err)
	}
	if st := n.Status(); st.TCPOpen != 0 {
		t.Errorf("status is %+v", st)
	}
}

// tcpConn is a connection of the guest with its endpoint at hand.
type tcpConn struct {
	conn *gonet.TCPConn
	ep   tcpip.Endpoint
}

func TestFrames(t *testing.T) {
	n, conn := plug(t, Config{Policy: PolicyInternet})
	send := func(dst string, src, to tcpip.Address) {
		t.Helper()
		if _, err := conn.Write(echoFrame(t, dst, src, to)); err != nil {
			t.Fatal(err)
		}
	}
	send(gatewayMAC, guestAddr, tcpip.AddrFrom4([4]byte{8, 8, 8, 8}))      // the world does not answer
	send(gatewayMAC, tcpip.AddrFrom4([4]byte{10, 188, 0, 9}), gatewayAddr) // not the guest's address
	send("52:48:00:00:00:99", guestAddr, gatewayAddr)                      // not our card
	send(gatewayMAC, guestAddr, gatewayAddr)                               // answered
	if err := conn.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	r, buf := bufio.NewReader(conn), make([]byte, maxFrame)
	for {
		frame, err := readFrame(r, buf)
		if err != nil {
			t.Fatal(err)
		}
		eth := header.Ethernet(frame)
		if eth.Type() == header.ARPProtocolNumber { // it asks who we are
			if _, err := conn.Write(arpReply(t)); err != nil {
				t.Fatal(err)
			}
			continue
		}
		ip := header.IPv4(frame[header.EthernetMinimumSize:])
		if ip.SourceAddress() != gatewayAddr || header.ICMPv4(ip.Payload()).Type() != header.ICMPv4EchoReply {
			t.Errorf("first answer is from %s", ip.SourceAddress())
		}
		break
	}
	if n.Status().BytesIn == 0 {
		t.Error("nothing was counted")
	}
}

func TestImpossibleFrameEndsServe(t *testing.T) {
	n, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	ours, theirs := pipe(t)
	defer theirs.Close()
	if _, err := theirs.Write([]byte{0xff, 0xff, 0xff, 0xff}); err != nil {
		t.Fatal(err)
	}
	if err := n.Serve(t.Context(), ours); !errors.Is(err, errFrame) {
		t.Errorf("serve gave %v", err)
	}
	if _, err := New(Config{Policy: "all"}); err == nil {
		t.Error("an unknown policy was taken")
	}
}
