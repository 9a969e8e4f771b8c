package guestnet

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/miekg/dns"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
	"gvisor.dev/gvisor/pkg/waiter"
)

// startDHCP answers the one client there can be. It ends when the stack closes.
func (n *Network) startDHCP() error {
	var wq waiter.Queue
	ep, err := n.stack.NewEndpoint(udp.ProtocolNumber, ipv4.ProtocolNumber, &wq)
	if err != nil {
		return fmt.Errorf("listen for dhcp: %s", err)
	}
	ep.SocketOptions().SetBroadcast(true)
	if err := ep.Bind(tcpip.FullAddress{NIC: nicID, Port: dhcpv4.ServerPort}); err != nil {
		ep.Close()
		return fmt.Errorf("listen for dhcp: %s", err)
	}
	conn := gonet.NewUDPConn(&wq, ep)
	n.flow(func() {
		defer conn.Close()
		buf := make([]byte, 2048)
		for {
			size, _, err := conn.ReadFrom(buf)
			if err != nil {
				return // only Close ends a socket of our own stack
			}
			reply, err := answerDHCP(buf[:size])
			if err != nil {
				n.log.Debug("dhcp message dropped", "err", err)
				continue
			}
			if _, err := conn.WriteTo(reply, &net.UDPAddr{IP: net.IPv4bcast, Port: dhcpv4.ClientPort}); err != nil {
				n.log.Warn("dhcp answer not sent", "err", err)
			}
		}
	})
	n.onClose(func() { _ = conn.Close() })
	return nil
}

// answerDHCP makes the answer to one message (RFC 2131).
func answerDHCP(message []byte) ([]byte, error) {
	m, err := dhcpv4.FromBytes(message)
	if err != nil {
		return nil, fmt.Errorf("read dhcp message: %w", err)
	}
	if m.OpCode != dhcpv4.OpcodeBootRequest {
		return nil, errors.New("not a dhcp request")
	}
	gateway, guest := net.ParseIP(GatewayAddr).To4(), net.ParseIP(GuestAddr).To4()
	kind := dhcpv4.MessageTypeOffer
	switch m.MessageType() {
	case dhcpv4.MessageTypeDiscover:
	case dhcpv4.MessageTypeRequest:
		kind = dhcpv4.MessageTypeAck
		asked := m.RequestedIPAddress()
		if asked == nil || asked.IsUnspecified() {
			asked = m.ClientIPAddr
		}
		if !asked.Equal(guest) {
			kind = dhcpv4.MessageTypeNak
		}
	default:
		return nil, fmt.Errorf("dhcp message %s needs no answer", m.MessageType())
	}
	options := []dhcpv4.Modifier{
		dhcpv4.WithMessageType(kind), dhcpv4.WithServerIP(gateway), dhcpv4.WithOption(dhcpv4.OptServerIdentifier(gateway)),
	}
	if kind != dhcpv4.MessageTypeNak {
		options = append(options,
			dhcpv4.WithYourIP(guest), dhcpv4.WithNetmask(net.CIDRMask(24, 32)), dhcpv4.WithRouter(gateway), dhcpv4.WithDNS(gateway),
			dhcpv4.WithLeaseTime(uint32((24 * time.Hour).Seconds())),
			dhcpv4.WithOption(dhcpv4.Option{Code: dhcpv4.OptionInterfaceMTU, Value: dhcpv4.Uint16(MTU)}),
		)
	}
	reply, err := dhcpv4.NewReplyFromRequest(m, options...)
	if err != nil {
		return nil, fmt.Errorf("make dhcp answer: %w", err)
	}
	return reply.ToBytes(), nil
}

// startDNS answers questions on the gateway address, over UDP and TCP.
func (n *Network) startDNS() error {
	at := tcpip.FullAddress{NIC: nicID, Addr: gatewayAddr, Port: 53}
	packets, err := gonet.DialUDP(n.stack, &at, nil, ipv4.ProtocolNumber)
	if err != nil {
		return fmt.Errorf("listen for dns: %w", err)
	}
	listener, err := gonet.ListenTCP(n.stack, at, ipv4.ProtocolNumber)
	if err != nil {
		return errors.Join(fmt.Errorf("listen for dns: %w", err), packets.Close())
	}
	slots := make(chan struct{}, maxQueries) // bounds the questions asked upstream at one time
	handler := dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		n.queries.Add(1)
		reply := new(dns.Msg).SetRcode(q, dns.RcodeServerFailure)
		select {
		case slots <- struct{}{}:
			reply = n.resolve(q)
			<-slots
		default:
		}
		size := dns.MaxMsgSize
		if w.RemoteAddr().Network() == "udp" {
			size = dns.MinMsgSize
			if opt := q.IsEdns0(); opt != nil {
				size = max(size, int(opt.UDPSize()))
			}
		}
		reply.Truncate(size)
		if err := w.WriteMsg(reply); err != nil {
			n.log.Debug("dns answer not sent", "err", err)
		}
	})
	for _, server := range []*dns.Server{{PacketConn: packets, Handler: handler}, {Listener: listener, Handler: handler}} {
		started := make(chan struct{})
		server.NotifyStartedFunc = func() { close(started) }
		n.flow(func() {
			if err := server.ActivateAndServe(); err != nil && n.ctx.Err() == nil {
				n.log.Error("guest name service ended", "err", err)
			}
		})
		n.onClose(func() {
			<-started // Shutdown refuses a server that has not begun
			if err := server.Shutdown(); err != nil {
				n.log.Debug("guest name service not shut down", "err", err)
			}
		})
	}
	return nil
}

// onClose runs f when the network closes, as one of its goroutines.
func (n *Network) onClose(f func()) {
	n.flow(func() {
		<-n.ctx.Done()
		f()
	})
}

// resolve answers one question of a guest.
func (n *Network) resolve(q *dns.Msg) *dns.Msg {
	reply := new(dns.Msg).SetReply(q)
	reply.RecursionAvailable = true
	if n.rules.policy == PolicyNone || q.Opcode != dns.OpcodeQuery || len(q.Question) != 1 || q.Question[0].Qclass != dns.ClassINET {
		return reply.SetRcode(q, dns.RcodeRefused)
	}
	switch q.Question[0].Qtype {
	case dns.TypeAXFR, dns.TypeIXFR, dns.TypeANY:
		return reply.SetRcode(q, dns.RcodeRefused)
	case dns.TypeAAAA:
		return reply // there is no IPv6 to use it with
	}
	servers, err := n.cfg.Resolvers()
	if err != nil {
		n.log.Warn("no name server known", "err", err)
		return reply.SetRcode(q, dns.RcodeServerFailure)
	}
	ask := new(dns.Msg)
	ask.SetQuestion(q.Question[0].Name, q.Question[0].Qtype)
	ask.SetEdns0(4096, false)
	for _, server := range servers {
		answer, err := n.ask(ask, server)
		if err != nil {
			n.log.Debug("name server did not answer", "peer", server, "err", err)
			continue
		}
		reply.Rcode, reply.Ns = answer.Rcode, answer.Ns
		reply.Answer = n.public(answer.Answer)
		return reply
	}
	return reply.SetRcode(q, dns.RcodeServerFailure)
}

func (n *Network) ask(q *dns.Msg, server string) (*dns.Msg, error) {
	client := dns.Client{Timeout: 4 * time.Second, UDPSize: 4096}
	answer, _, err := client.ExchangeContext(n.ctx, q, server)
	if err == nil && answer.Truncated {
		client.Net = "tcp"
		answer, _, err = client.ExchangeContext(n.ctx, q, server)
	}
	return answer, err
}

// public leaves out the addresses a guest may not reach, so that a name cannot be
// rebound to the host's own network. Dialling them would be refused anyway.
func (n *Network) public(records []dns.RR) []dns.RR {
	var list []dns.RR
	for _, rr := range records {
		if a, ok := rr.(*dns.A); ok {
			addr, valid := netip.AddrFromSlice(a.A)
			if err := n.rules.check(addr); !valid || err != nil {
				n.refuse("dns", netip.AddrPortFrom(addr.Unmap(), 0), ErrDenied)
				continue
			}
		}
		list = append(list, rr)
	}
	return list
}

// systemResolvers reads the host's name servers anew each time, because laptops
// change networks.
func systemResolvers() ([]string, error) {
	config, err := dns.ClientConfigFromFile("/etc/resolv.conf")
	if err != nil {
		return nil, fmt.Errorf("read name servers: %w", err)
	}
	list := make([]string, 0, len(config.Servers))
	for _, s := range config.Servers {
		list = append(list, net.JoinHostPort(s, config.Port))
	}
	if len(list) == 0 {
		return nil, errors.New("/etc/resolv.conf names no server")
	}
	return list, nil
}
