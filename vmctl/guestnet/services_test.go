package guestnet

import (
	"errors"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/miekg/dns"
)

func discover(t testing.TB, request bool) []byte {
	t.Helper()
	mac, err := net.ParseMAC(guestMAC)
	if err != nil {
		t.Fatal(err)
	}
	m, err := dhcpv4.NewDiscovery(mac)
	if err != nil {
		t.Fatal(err)
	}
	if request {
		m.UpdateOption(dhcpv4.OptMessageType(dhcpv4.MessageTypeRequest))
		m.UpdateOption(dhcpv4.OptRequestedIPAddress(net.ParseIP(GuestAddr)))
	}
	return m.ToBytes()
}

func TestDHCP(t *testing.T) {
	other := func() []byte {
		m, err := dhcpv4.FromBytes(discover(t, true))
		if err != nil {
			t.Fatal(err)
		}
		m.UpdateOption(dhcpv4.OptRequestedIPAddress(net.ParseIP("10.0.0.9")))
		return m.ToBytes()
	}()
	for name, c := range map[string]struct {
		in   []byte
		kind dhcpv4.MessageType
		addr string
	}{
		"discover":      {discover(t, false), dhcpv4.MessageTypeOffer, GuestAddr},
		"request":       {discover(t, true), dhcpv4.MessageTypeAck, GuestAddr},
		"other address": {other, dhcpv4.MessageTypeNak, "0.0.0.0"},
	} {
		t.Run(name, func(t *testing.T) {
			out, err := answerDHCP(c.in)
			if err != nil {
				t.Fatal(err)
			}
			m, err := dhcpv4.FromBytes(out)
			if err != nil {
				t.Fatal(err)
			}
			if m.MessageType() != c.kind || m.YourIPAddr.String() != c.addr {
				t.Errorf("answer is %s", m.Summary())
			}
			if c.kind == dhcpv4.MessageTypeNak {
				return
			}
			mtu, err := dhcpv4.GetUint16(dhcpv4.OptionInterfaceMTU, m.Options)
			if err != nil || mtu != MTU || m.Router()[0].String() != GatewayAddr || m.DNS()[0].String() != GatewayAddr {
				t.Errorf("answer is %s", m.Summary())
			}
		})
	}
	for name, in := range map[string][]byte{"rubbish": {1, 2, 3}, "answer": func() []byte {
		out, err := answerDHCP(discover(t, false))
		if err != nil {
			t.Fatal(err)
		}
		return out
	}()} {
		if _, err := answerDHCP(in); err == nil {
			t.Errorf("%s was answered", name)
		}
	}
}

// nameServer is the host's resolver in the tests.
func nameServer(t *testing.T) string {
	t.Helper()
	zone := map[string][]string{
		"public.test.":  {"93.184.216.34"},
		"private.test.": {"10.0.0.5"},
		"mixed.test.":   {"127.0.0.1", "93.184.216.35", "169.254.169.254"},
	}
	handler := dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg).SetReply(q)
		name := q.Question[0].Name
		switch {
		case q.Question[0].Qtype == dns.TypeTXT:
			for range 40 {
				m.Answer = append(m.Answer, &dns.TXT{Hdr: dns.RR_Header{Name: name, Rrtype: dns.TypeTXT, Class: dns.ClassINET}, Txt: []string{strings.Repeat("x", 200)}})
			}
			if w.RemoteAddr().Network() == "udp" {
				m.Truncate(512)
			}
		case zone[name] == nil:
			m.Rcode = dns.RcodeNameError
		}
		for _, a := range zone[name] {
			m.Answer = append(m.Answer, &dns.A{Hdr: dns.RR_Header{Name: name, Rrtype: dns.TypeA, Class: dns.ClassINET}, A: net.ParseIP(a)})
		}
		_ = w.WriteMsg(m) // the client of the test sees what is missing
	})
	var pc net.PacketConn
	var ln net.Listener
	for ln == nil { // a port that is free for UDP may be somebody's for TCP
		var err error
		if pc, err = net.ListenPacket("udp", "127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
		if ln, err = net.Listen("tcp", pc.LocalAddr().String()); err != nil {
			if !errors.Is(err, syscall.EADDRINUSE) {
				t.Fatal(err)
			}
			ln = nil
			_ = pc.Close() // the next one then
		}
	}
	for _, s := range []*dns.Server{{PacketConn: pc, Handler: handler}, {Listener: ln, Handler: handler}} {
		started, ended := make(chan struct{}), make(chan struct{})
		s.NotifyStartedFunc = func() { close(started) }
		go func() { // ends with Shutdown below
			defer close(ended)
			if err := s.ActivateAndServe(); err != nil {
				t.Error(err)
			}
		}()
		<-started
		t.Cleanup(func() {
			if err := s.Shutdown(); err != nil {
				t.Error(err)
			}
			<-ended
		})
	}
	return pc.LocalAddr().String()
}

func TestNames(t *testing.T) {
	server := nameServer(t)
	n, g := newGuest(t, Config{Policy: PolicyInternet, Resolvers: func() ([]string, error) { return []string{server}, nil }})
	ask := func(network, name string, kind uint16) *dns.Msg {
		t.Helper()
		var conn net.Conn
		var err error
		if network == "tcp" {
			conn, err = g.dial(GatewayAddr + ":53")
		} else {
			conn = g.dialUDP(GatewayAddr + ":53")
		}
		if err != nil {
			t.Fatal(err)
		}
		client := dns.Client{Net: network, Timeout: 10 * time.Second}
		reply, _, err := client.ExchangeWithConn(new(dns.Msg).SetQuestion(name, kind), &dns.Conn{Conn: conn})
		if err != nil {
			t.Fatalf("%s %s: %v", network, name, err)
		}
		return reply
	}
	for _, network := range []string{"udp", "tcp"} {
		for name, want := range map[string]string{"public.test.": "93.184.216.34", "private.test.": "", "mixed.test.": "93.184.216.35"} {
			reply := ask(network, name, dns.TypeA)
			var got []string
			for _, rr := range reply.Answer {
				got = append(got, rr.(*dns.A).A.String())
			}
			if reply.Rcode != dns.RcodeSuccess || strings.Join(got, " ") != want {
				t.Errorf("%s %s: %s %v, want %q", network, name, dns.RcodeToString[reply.Rcode], got, want)
			}
		}
		if r := ask(network, "missing.test.", dns.TypeA); r.Rcode != dns.RcodeNameError {
			t.Errorf("missing name: %s", dns.RcodeToString[r.Rcode])
		}
		if r := ask(network, "public.test.", dns.TypeAAAA); r.Rcode != dns.RcodeSuccess || len(r.Answer) != 0 {
			t.Errorf("AAAA: %v", r)
		}
		if r := ask(network, "public.test.", dns.TypeANY); r.Rcode != dns.RcodeRefused {
			t.Errorf("ANY: %s", dns.RcodeToString[r.Rcode])
		}
	}
	if r := ask("udp", "big.test.", dns.TypeTXT); !r.Truncated {
		t.Error("a long answer over UDP is not marked")
	}
	if r := ask("tcp", "big.test.", dns.TypeTXT); r.Truncated || len(r.Answer) != 40 {
		t.Errorf("long answer over TCP has %d records", len(r.Answer))
	}
	if n.Status().Queries == 0 {
		t.Error("questions were not counted")
	}
}

func TestNamesWithoutServer(t *testing.T) {
	n, err := New(Config{Policy: PolicyInternet, Resolvers: func() ([]string, error) { return nil, errors.New("no network") }})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	q := new(dns.Msg).SetQuestion("a.test.", dns.TypeA)
	if r := n.resolve(q); r.Rcode != dns.RcodeServerFailure {
		t.Errorf("answer is %v", r)
	}
	n.cfg.Resolvers = func() ([]string, error) { return []string{"127.0.0.1:1"}, nil }
	if r := n.resolve(q); r.Rcode != dns.RcodeServerFailure {
		t.Errorf("answer is %v", r)
	}
	none, err := New(Config{Policy: PolicyNone})
	if err != nil {
		t.Fatal(err)
	}
	defer none.Close()
	if r := none.resolve(q); r.Rcode != dns.RcodeRefused {
		t.Errorf("answer under policy none is %v", r)
	}
}

func TestPolicy(t *testing.T) {
	host := func() ([]netip.Prefix, error) {
		return []netip.Prefix{netip.MustParsePrefix("93.184.216.0/24"), netip.MustParsePrefix("2606:4700::/64")}, nil
	}
	r := rules{policy: PolicyInternet, special: special(), host: host}
	for addr, want := range map[string]bool{
		"1.1.1.1": true, "8.8.8.8": true, "2606:2800::1": true, "::ffff:8.8.8.8": true, "172.15.255.255": true, "172.32.0.0": true,
		"0.0.0.0": false, "0.1.2.3": false, "10.0.0.1": false, "10.188.0.2": false, "100.64.0.1": false, "127.0.0.1": false,
		"127.88.1.1": false, "169.254.169.254": false, "172.16.0.1": false, "172.31.255.255": false, "192.0.0.1": false,
		"192.0.2.1": false, "192.168.0.1": false, "198.18.0.1": false, "198.19.255.255": false, "198.51.100.1": false,
		"203.0.113.9": false, "224.0.0.1": false, "239.255.255.250": false, "240.0.0.1": false, "255.255.255.255": false,
		"168.63.129.16": false, "93.184.216.34": false, "2606:4700::1": false,
		"::": false, "::1": false, "::ffff:127.0.0.1": false, "::ffff:10.0.0.1": false, "64:ff9b::7f00:1": false, "fe80::1": false,
		"fe80::1%eth0": false, "fc00::1": false, "fd00::1": false, "ff02::1": false, "2001:db8::1": false, "2002:7f00:1::": false,
		"2001::1": false, "3fff::1": false, "5f00::1": false,
	} {
		err := r.check(netip.MustParseAddr(addr))
		if (err == nil) != want || err != nil && !errors.Is(err, ErrDenied) {
			t.Errorf("%s: %v, want allowed %v", addr, err, want)
		}
	}
	if err := r.check(netip.Addr{}); !errors.Is(err, ErrDenied) {
		t.Errorf("no address: %v", err)
	}
	r.host = func() ([]netip.Prefix, error) { return nil, errors.New("cannot tell") }
	if err := r.check(netip.MustParseAddr("1.1.1.1")); !errors.Is(err, ErrDenied) {
		t.Errorf("unknown host addresses: %v", err)
	}
	own, err := hostNetworks()
	if err != nil || len(own) == 0 {
		t.Errorf("host networks are %v, %v", own, err)
	}
	if PolicyInternet.Validate() != nil || PolicyNone.Validate() != nil || Policy("").Validate() == nil {
		t.Error("policies are judged wrongly")
	}
}

func TestRefusalLog(t *testing.T) {
	var l refusalLog
	now := time.Now()
	if skipped, ok := l.note("a", now); !ok || skipped != 0 {
		t.Errorf("first: %d %v", skipped, ok)
	}
	for range 5 {
		if _, ok := l.note("b", now.Add(time.Millisecond)); ok {
			t.Error("logged again at once")
		}
	}
	if skipped, ok := l.note("c", now.Add(2*time.Second)); !ok || skipped != 5 || l.latest() != "c" {
		t.Errorf("later: %d %v %s", skipped, ok, l.latest())
	}
}
