package dnsd

import (
	"encoding/binary"
	"net/netip"
	"strings"

	"github.com/miekg/dns"
)

// transport is how a question came; it decides how long an answer may be.
type transport uint8

const (
	udpTransport transport = iota
	tcpTransport
)

const (
	headerSize = 12
	minUDPSize = 512  // RFC 1035 section 4.2.1
	maxUDPSize = 1232 // what passes every path unfragmented; also what we say we take
)

// answer appends the answer to msg to dst. It appends nothing for what must not
// be answered: a fragment of a header, or an answer (two servers would talk for
// ever). It reads nothing but its input and the lookups.
func (s *Server) answer(dst, msg []byte, tr transport) []byte {
	if len(msg) < headerSize || msg[2]&0x80 != 0 {
		return dst
	}
	if out, ok := s.answerPlain(dst, msg); ok {
		return out
	}
	reply, size := s.reply(msg, tr)
	packed, err := fit(reply, size)
	if err != nil {
		// Names that unpack but do not pack again; say that much and no more.
		bare := replyTo(msg, dns.RcodeFormatError)
		if packed, err = bare.Pack(); err != nil {
			return dst
		}
	}
	return append(dst, packed...)
}

// fit packs m, and cut down to its question when it is longer than size.
func fit(m *dns.Msg, size int) ([]byte, error) {
	packed, err := m.Pack()
	if err != nil || len(packed) <= size {
		return packed, err
	}
	m.Truncated, m.Answer, m.Ns = true, nil, nil
	return m.Pack()
}

// replyTo makes an answer from the header of msg alone.
func replyTo(msg []byte, rcode int) *dns.Msg {
	m := new(dns.Msg)
	m.Id = binary.BigEndian.Uint16(msg)
	m.Response = true
	m.Opcode = int(msg[2]>>3) & 0xf
	m.RecursionDesired = msg[2]&0x01 != 0
	m.CheckingDisabled = msg[3]&0x10 != 0 // RFC 4035 section 3.1.6
	m.Rcode = rcode
	m.Compress = true
	return m
}

// reply makes the answer to msg and says how long it may be.
func (s *Server) reply(msg []byte, tr transport) (*dns.Msg, int) {
	size := minUDPSize
	if tr == tcpTransport {
		size = dns.MaxMsgSize
	}
	if opcode := int(msg[2]>>3) & 0xf; opcode != dns.OpcodeQuery {
		return replyTo(msg, dns.RcodeNotImplemented), size
	}
	if binary.BigEndian.Uint16(msg[4:]) != 1 { // RFC 9619 for more than one
		return replyTo(msg, dns.RcodeFormatError), size
	}
	var query dns.Msg
	if err := query.Unpack(msg); err != nil || len(query.Question) != 1 || !counted(msg, &query) {
		return replyTo(msg, dns.RcodeFormatError), size
	}
	m := replyTo(msg, dns.RcodeSuccess)
	m.Question = query.Question
	var opt *dns.OPT
	for _, rr := range query.Extra {
		if o, ok := rr.(*dns.OPT); ok {
			if opt != nil || o.Hdr.Name != "." { // RFC 6891 section 6.1.1
				m.Rcode = dns.RcodeFormatError
				return m, size
			}
			opt = o
		}
	}
	if opt != nil {
		if tr == udpTransport {
			size = min(max(int(opt.UDPSize()), minUDPSize), maxUDPSize)
		}
		m.SetEdns0(maxUDPSize, opt.Do())
		if opt.Version() != 0 {
			m.Rcode = dns.RcodeBadVers
			return m, size
		}
	}
	s.fill(m, query.Question[0])
	return m, size
}

// counted reports whether all the records that the header promises were there;
// the library takes a message that ends early for one that says less.
func counted(msg []byte, m *dns.Msg) bool {
	return len(m.Answer) == int(binary.BigEndian.Uint16(msg[6:])) &&
		len(m.Ns) == int(binary.BigEndian.Uint16(msg[8:])) &&
		len(m.Extra) == int(binary.BigEndian.Uint16(msg[10:]))
}

// fill answers q in m.
func (s *Server) fill(m *dns.Msg, q dns.Question) {
	name := strings.ToLower(q.Name)
	z, host, addrs, found := s.find(name)
	switch {
	case q.Qclass != dns.ClassINET && q.Qclass != dns.ClassANY,
		q.Qtype == dns.TypeAXFR, q.Qtype == dns.TypeIXFR, z == nil:
		m.Rcode = dns.RcodeRefused
		return
	}
	m.Authoritative = true
	head := func(rrtype uint16) dns.RR_Header {
		return dns.RR_Header{Name: q.Name, Rrtype: rrtype, Class: dns.ClassINET, Ttl: ttl}
	}
	apex := name == z.name
	switch {
	case !found:
		m.Rcode = dns.RcodeNameError
	case q.Qtype == dns.TypeANY: // RFC 8482 section 4.2
		m.Answer = []dns.RR{&dns.HINFO{Hdr: head(dns.TypeHINFO), Cpu: "RFC8482"}}
	case q.Qtype == dns.TypeSOA && apex:
		m.Answer = []dns.RR{s.soa(z, q.Name)}
	case q.Qtype == dns.TypeNS && apex:
		m.Answer = []dns.RR{&dns.NS{Hdr: head(dns.TypeNS), Ns: s.server(z)}}
	case q.Qtype == dns.TypePTR && z.net.IsValid() && host != "":
		m.Answer = []dns.RR{&dns.PTR{Hdr: head(dns.TypePTR), Ptr: host + "." + s.zones[0].name}}
	case q.Qtype == dns.TypeA && addrs.A.Is4():
		m.Answer = []dns.RR{&dns.A{Hdr: head(dns.TypeA), A: addrs.A.AsSlice()}}
	case q.Qtype == dns.TypeAAAA && addrs.AAAA.Is6():
		m.Answer = []dns.RR{&dns.AAAA{Hdr: head(dns.TypeAAAA), AAAA: addrs.AAAA.AsSlice()}}
	}
	if len(m.Answer) == 0 {
		m.Ns = []dns.RR{s.soa(z, z.name)}
	}
}

// find returns the zone that name is in, nil for none, the host that name leads
// to, "" for none, its addresses when asked forward, and whether the name exists.
func (s *Server) find(name string) (z *zone, host string, a Answer, found bool) {
	for i := range s.zones {
		if z := &s.zones[i]; dns.IsSubDomain(z.name, name) {
			labels := dns.SplitDomainName(name)
			at := len(labels) - dns.CountLabel(z.name) - 1
			if at < 0 {
				return z, "", a, true // the apex
			}
			a, found := s.lookup(labels[at])
			return z, labels[at], a, found
		}
	}
	for i := range s.arpa {
		if z := &s.arpa[i]; dns.IsSubDomain(z.name, name) {
			addr, whole, ok := reverseAddr(name)
			if !ok || !whole { // the latter are names on the way to addresses
				return z, "", a, ok
			}
			host, found := s.reverse(addr)
			return z, host, a, found
		}
	}
	return nil, "", a, false
}

// server names the gateway as the zone's name server.
func (s *Server) server(z *zone) string {
	if z.net.IsValid() {
		z = &s.zones[0]
	}
	return "gw." + z.name
}

// soa is the zone's SOA. Nobody transfers the zone, so only its last field means
// something: for how long "there is none" may be kept (RFC 2308 section 4).
func (s *Server) soa(z *zone, owner string) *dns.SOA {
	return &dns.SOA{
		Hdr: dns.RR_Header{Name: owner, Rrtype: dns.TypeSOA, Class: dns.ClassINET, Ttl: ttl},
		Ns:  s.server(z), Mbox: "hostmaster." + strings.TrimPrefix(s.server(z), "gw."),
		Serial: 1, Refresh: 3600, Retry: 600, Expire: 86400, Minttl: ttl,
	}
}

// reverseZone names the reverse zone of a network: 88.127.in-addr.arpa. for
// 127.88.0.0/16.
func reverseZone(n netip.Prefix) string {
	full, _ := dns.ReverseAddr(n.Addr().String()) // an address is always a good one
	labels := dns.SplitDomainName(full)
	digits, bits := 4, 8
	if n.Addr().Is6() {
		digits, bits = 32, 4
	}
	return strings.Join(labels[digits-n.Bits()/bits:], ".") + "."
}

// reverseAddr reads an address from its name below in-addr.arpa or ip6.arpa. It
// reports whether the name has the form at all, and whether all of the address
// is there. Leading zeros are refused: one address has one name.
func reverseAddr(name string) (addr netip.Addr, whole, ok bool) {
	labels := dns.SplitDomainName(name)
	root := labels[len(labels)-2]
	labels = labels[:len(labels)-2]
	if root == "ip6" {
		return reverseAddr6(labels)
	}
	var v4 [4]byte
	if len(labels) > len(v4) {
		return addr, false, false
	}
	for i, l := range labels {
		n := 0
		for _, c := range []byte(l) {
			if c < '0' || c > '9' || n > 255 {
				return addr, false, false
			}
			n = n*10 + int(c-'0')
		}
		if n > 255 || len(l) > 1 && l[0] == '0' {
			return addr, false, false
		}
		v4[len(labels)-1-i] = byte(n)
	}
	return netip.AddrFrom4(v4), len(labels) == len(v4), true
}

func reverseAddr6(labels []string) (addr netip.Addr, whole, ok bool) {
	var v6 [16]byte
	if len(labels) > 2*len(v6) {
		return addr, false, false
	}
	for i, l := range labels {
		digit := strings.IndexByte("0123456789abcdef", l[0])
		if len(l) != 1 || digit < 0 {
			return addr, false, false
		}
		at := len(labels) - 1 - i
		v6[at/2] |= byte(digit << (4 - 4*(at%2)))
	}
	return netip.AddrFrom16(v6), len(labels) == 2*len(v6), true
}
