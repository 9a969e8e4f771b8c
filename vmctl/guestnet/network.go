// Package guestnet is the network of one guest: a TCP/IP stack in this process
// at the other end of the guest's network card.
//
// The guest is alone on 10.188.0.0/24 with its gateway. It gets its address by
// DHCP, asks the gateway for names, and what it sends to any other address is
// dialled anew from the host if the Policy lets it: so the policy is checked on
// the address really dialled, and no packet of a guest is ever forwarded. There
// is no way in from the host's network. A connection is accepted towards the
// guest only when the far side has accepted it, and ends (FIN, RST) are passed on.
package guestnet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/network/arp"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
)

// Addresses of every guest's network. Guests do not see each other, so all use
// the same ones.
const (
	Subnet      = "10.188.0.0/24"
	GatewayAddr = "10.188.0.1"
	GuestAddr   = "10.188.0.2"
	LinkPort    = 4580 // on the gateway address: the fast link to the gateway process
	// LinkAddr is what a guest dials for its fast link.
	LinkAddr = GatewayAddr + ":4580"
	// MTU is the largest the card, the frames and IPv4 allow; fewer, larger packets
	// are the only way to make a userspace stack fast.
	MTU = 65520
)

var (
	gatewayAddr = tcpip.AddrFrom4([4]byte{10, 188, 0, 1})
	guestAddr   = tcpip.AddrFrom4([4]byte{10, 188, 0, 2})
)

const nicID = 1

// gatewayMAC may be the same everywhere, since no two guests share a network.
const gatewayMAC = "52:48:00:00:00:01"

// Config is what a network needs to know.
type Config struct {
	Policy    Policy                         // "": none
	Link      string                         // unix socket behind LinkPort, "": the port is closed
	Resolvers func() ([]string, error)       // host:port of the host's name servers, nil: /etc/resolv.conf
	HostNets  func() ([]netip.Prefix, error) // networks never to be reached, nil: those of the host's interfaces
	DialTime  time.Duration                  // for one connection, 0: 20 s
	UDPIdle   time.Duration                  // a silent UDP flow ends after this, 0: 60 s
	// Divert is for tests: what it returns true for is dialled at the address it
	// returns, whatever the policy says. nil: nothing.
	Divert func(netip.AddrPort) (netip.AddrPort, bool)
	Log    *slog.Logger // nil: discard
}

// Limits of one guest, so that it cannot use up the host's descriptors.
const (
	maxTCP     = 4096
	maxDialing = 512
	maxUDP     = 1024
	maxQueries = 128
)

// Network is one guest's network. New makes it, Serve runs it.
type Network struct {
	cfg   Config
	log   *slog.Logger
	rules rules
	link  *link
	stack *stack.Stack

	ctx    context.Context // ends when the network closes; set by New, see Close
	cancel context.CancelFunc

	mu     sync.Mutex // guards closed and the start of flows
	closed bool
	flows  sync.WaitGroup

	links                                                  atomic.Int64 // open connections to Link
	tcpOpen, udpOpen, tcpTotal, udpTotal, queries, refused atomic.Int64
	refusals                                               refusalLog
}

// Status is what a network does, as read back from it.
type Status struct {
	Policy   Policy `json:"policy"`
	Gateway  string `json:"gateway"`
	Guest    string `json:"guest"`
	MTU      int    `json:"mtu"`
	Cable    bool   `json:"cable"` // QEMU is connected
	Link     bool   `json:"link"`  // the fast link's port is open
	TCPOpen  int64  `json:"tcp_open"`
	TCPTotal int64  `json:"tcp_total"`
	UDPOpen  int64  `json:"udp_open"`
	UDPTotal int64  `json:"udp_total"`
	Queries  int64  `json:"queries"`
	Refused  int64  `json:"refused"`                // by the policy
	Last     string `json:"last_refused,omitempty"` // address and port
	BytesIn  uint64 `json:"bytes_in"`               // from the guest
	BytesOut uint64 `json:"bytes_out"`
}

// New makes a network whose services are up and whose cable is not. Close frees it.
func New(cfg Config) (*Network, error) {
	if cfg.Policy == "" {
		cfg.Policy = PolicyNone
	}
	if err := cfg.Policy.Validate(); err != nil {
		return nil, err
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.DialTime == 0 {
		cfg.DialTime = 20 * time.Second
	}
	if cfg.UDPIdle == 0 {
		cfg.UDPIdle = time.Minute
	}
	if cfg.Resolvers == nil {
		cfg.Resolvers = systemResolvers
	}
	if cfg.HostNets == nil {
		cfg.HostNets = hostNetworks
	}
	mac, err := net.ParseMAC(gatewayMAC)
	if err != nil {
		return nil, fmt.Errorf("gateway address: %w", err)
	}
	n := &Network{cfg: cfg, log: cfg.Log, link: &link{mac: tcpip.LinkAddress(mac)}}
	n.rules = rules{policy: cfg.Policy, special: special(), host: cfg.HostNets}
	n.ctx, n.cancel = context.WithCancel(context.Background())
	if err := n.build(); err != nil {
		return nil, errors.Join(fmt.Errorf("guest network: %w", err), n.Close())
	}
	return n, nil
}

// build makes the stack: it takes packets for every address (promiscuous) and may
// answer from every address (spoofing), which is what lets it stand in for the
// whole internet.
func (n *Network) build() error {
	s := stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, arp.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol, icmp.NewProtocol4},
	})
	n.stack = s
	address := tcpip.ProtocolAddress{
		Protocol:          ipv4.ProtocolNumber,
		AddressWithPrefix: tcpip.AddressWithPrefix{Address: gatewayAddr, PrefixLen: 24},
	}
	sack := tcpip.TCPSACKEnabled(true)
	receive := tcpip.TCPReceiveBufferSizeRangeOption{Min: 4 << 10, Default: 1 << 20, Max: 4 << 20}
	send := tcpip.TCPSendBufferSizeRangeOption{Min: 4 << 10, Default: 1 << 20, Max: 4 << 20}
	for _, err := range []tcpip.Error{
		s.CreateNIC(nicID, n.link),
		s.AddProtocolAddress(nicID, address, stack.AddressProperties{}),
		s.SetPromiscuousMode(nicID, true),
		s.SetSpoofing(nicID, true),
		s.SetTransportProtocolOption(tcp.ProtocolNumber, &sack),
		s.SetTransportProtocolOption(tcp.ProtocolNumber, &receive),
		s.SetTransportProtocolOption(tcp.ProtocolNumber, &send),
	} {
		if err != nil {
			return errors.New(err.String())
		}
	}
	s.SetRouteTable([]tcpip.Route{{Destination: header.IPv4EmptySubnet, NIC: nicID}})
	s.SetTransportProtocolHandler(tcp.ProtocolNumber, tcp.NewForwarder(s, 0, maxDialing, n.acceptTCP).HandlePacket)
	forward := udp.NewForwarder(s, n.acceptUDP)
	s.SetTransportProtocolHandler(udp.ProtocolNumber, func(id stack.TransportEndpointID, pkt *stack.PacketBuffer) bool {
		// False leaves a datagram to the stack, like one for a closed port.
		return n.admitUDP(id) && forward.HandlePacket(id, pkt)
	})
	return errors.Join(n.startDHCP(), n.startDNS())
}

// Serve joins the guest's card to the network until conn ends, and returns why.
// It closes conn, also when ctx ends. A network serves one guest at a time.
func (n *Network) Serve(ctx context.Context, conn net.Conn) error {
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	n.link.attach(conn)
	defer n.link.attach(nil)
	err := n.link.run(conn)
	_ = conn.Close() // the peer is gone, or run has given it up
	if ctx.Err() != nil || errors.Is(err, io.EOF) {
		return nil
	}
	return fmt.Errorf("guest network: %w", err)
}

// Close ends every flow and waits for its goroutines.
func (n *Network) Close() error {
	n.mu.Lock()
	n.closed = true
	n.mu.Unlock()
	n.cancel()
	if n.stack != nil {
		n.stack.Close()
	}
	n.flows.Wait()
	if n.stack != nil {
		n.stack.Wait()
	}
	return nil
}

// Status reads back what is enforced and counts what was done.
func (n *Network) Status() Status {
	n.link.mu.Lock()
	cable := n.link.conn != nil
	n.link.mu.Unlock()
	return Status{
		Policy: n.rules.policy, Gateway: GatewayAddr, Guest: GuestAddr, MTU: MTU, Cable: cable, Link: n.cfg.Link != "",
		TCPOpen: n.tcpOpen.Load(), TCPTotal: n.tcpTotal.Load(), UDPOpen: n.udpOpen.Load(), UDPTotal: n.udpTotal.Load(),
		Queries: n.queries.Load(), Refused: n.refused.Load(), Last: n.refusals.latest(),
		BytesIn: n.link.in.Load(), BytesOut: n.link.out.Load(),
	}
}

// begin counts the calling goroutine among those Close waits for; flows.Done ends
// that. It reports false when the network is closed.
func (n *Network) begin() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return false
	}
	n.flows.Add(1)
	return true
}

// flow runs f as a goroutine of the network. It reports false, without running
// f, when the network is closed.
func (n *Network) flow(f func()) bool {
	if !n.begin() {
		return false
	}
	go func() {
		defer n.flows.Done()
		f()
	}()
	return true
}

// refuse counts and, at most once a second, logs what the policy has stopped.
func (n *Network) refuse(network string, to netip.AddrPort, err error) {
	n.refused.Add(1)
	if skipped, ok := n.refusals.note(network+" "+to.String(), time.Now()); ok {
		n.log.Warn("guest refused", "peer", to.String(), "network", network, "skipped", skipped, "err", err)
	}
}

// refusalLog keeps a guest from filling the log.
type refusalLog struct {
	mu      sync.Mutex
	last    string
	logged  time.Time
	skipped int
}

// note remembers a refusal and reports whether to log it, with the number of
// those left out before.
func (l *refusalLog) note(what string, now time.Time) (skipped int, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last = what
	if now.Sub(l.logged) < time.Second {
		l.skipped++
		return 0, false
	}
	skipped, l.skipped, l.logged = l.skipped, 0, now
	return skipped, true
}

func (l *refusalLog) latest() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.last
}
