// Package dnsd answers DNS questions for the zones of a gateway, with authority
// and from memory.
//
// A Server gives the answers of one side: what its Lookup says is what everybody
// asking through its sockets is told. A gateway with several sides (loopback,
// WireGuard) runs one Server for each, so that the receiving socket decides and
// never the source address, which anybody can write into a packet. Give each
// address a socket of its own: an answer must leave from the address that was
// asked, and a socket on 0.0.0.0 does not know it.
//
// Rules, beside RFC 1034 and 1035: a name that exists makes every name below it
// exist; a type we lack is an empty answer with SOA (RFC 2308), never silence; ANY
// gets one HINFO (RFC 8482); EDNS as in RFC 6891; TCP as in RFC 7766.
package dnsd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sync/errgroup"
)

// TTL is how long an answer may be kept, the negative ones included. It bounds how
// long a client believes in a name that was deleted or made since.
const TTL = 5 * time.Second

const ttl = uint32(TTL / time.Second)

// Answer is the addresses of a name. A zero address means there is none of that
// family: the question for it is answered empty.
type Answer struct {
	A    netip.Addr // IPv4
	AAAA netip.Addr // IPv6
}

// LookupFunc finds the addresses of host, which is the one label below the zone,
// in lower case: "demo" for demo.helix.local and for everything below that name,
// in every zone of the Server. It reports false for a name that is not ours. It
// is called for each question by several goroutines and must not block.
type LookupFunc func(host string) (a Answer, ok bool)

// ReverseFunc finds the host that owns addr, as LookupFunc names it. The rules of
// LookupFunc hold for it too.
type ReverseFunc func(addr netip.Addr) (host string, ok bool)

// Config is what a Server answers from.
type Config struct {
	// Zones are answered alike; lower case, no dots at the ends, two labels or more.
	// The first is the one that reverse answers name.
	Zones  []string
	Lookup LookupFunc
	// Networks are the addresses whose reverse zones are ours: IPv4 with 8, 16 or 24
	// bits, IPv6 with a multiple of 4. Reverse may be nil when there are none.
	Networks []netip.Prefix
	Reverse  ReverseFunc
	Log      *slog.Logger // nil discards
}

// Validate reports every fault at once.
func (c Config) Validate() error {
	var faults []error
	if len(c.Zones) == 0 {
		faults = append(faults, errors.New("zones: none given"))
	}
	if c.Lookup == nil {
		faults = append(faults, errors.New("lookup: none given"))
	}
	if len(c.Networks) > 0 && c.Reverse == nil {
		faults = append(faults, errors.New("reverse: none given for the networks"))
	}
	seen := make(map[string]bool)
	for _, z := range c.Zones {
		if fault := zoneFault(z); fault != "" {
			faults = append(faults, fmt.Errorf("zone %q: %s", z, fault))
		}
		for other := range seen {
			if dns.IsSubDomain(other+".", z+".") || dns.IsSubDomain(z+".", other+".") {
				faults = append(faults, fmt.Errorf("zone %q: lies in or around %q", z, other))
			}
		}
		seen[z] = true
	}
	for _, n := range c.Networks {
		aligned := n.IsValid() && n == n.Masked() && n.Bits() > 0 &&
			(n.Addr().Is4() && n.Bits()%8 == 0 && n.Bits() < 32 || n.Addr().Is6() && n.Bits()%4 == 0 && n.Bits() < 128)
		if !aligned {
			faults = append(faults, fmt.Errorf("network %s: its length is not one that a reverse zone can have", n))
		}
	}
	return errors.Join(faults...)
}

// zoneFault returns what is wrong with a zone, or "". A single label is refused:
// answering for all of "local" would take multicast DNS away from the machine
// (RFC 6762), and other top level names are not ours either.
func zoneFault(zone string) string {
	labels := strings.Split(zone, ".")
	if len(labels) < 2 {
		return "has one label; a zone needs two, as in helix.local"
	}
	if len(zone) > 180 {
		return "is longer than 180 characters and leaves no room for names"
	}
	for _, l := range labels {
		if l == "" || len(l) > 63 || strings.Trim(l, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" {
			return "is not made of labels of a-z, 0-9 and - with single dots between them"
		}
	}
	if labels[len(labels)-1] == "arpa" {
		return "is a reverse zone; give the network instead"
	}
	return ""
}

// zone is one zone in the forms that answering needs.
type zone struct {
	name string // "helix.local."
	wire []byte // RFC 1035 section 3.1, lower case
	net  netip.Prefix
}

// Server answers questions. Its methods may be called concurrently.
type Server struct {
	lookup  LookupFunc
	reverse ReverseFunc
	log     *slog.Logger
	zones   []zone // forward
	arpa    []zone // reverse
	limits  limits
}

// New makes a Server.
func New(cfg Config) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("dns server: %w", err)
	}
	s := &Server{lookup: cfg.Lookup, reverse: cfg.Reverse, log: cfg.Log, limits: defaultLimits}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	for _, z := range cfg.Zones {
		s.zones = append(s.zones, newZone(z+"."))
	}
	for _, n := range cfg.Networks {
		z := newZone(reverseZone(n))
		z.net = n
		s.arpa = append(s.arpa, z)
	}
	return s, nil
}

func newZone(name string) zone {
	wire := make([]byte, 256)
	n, err := dns.PackDomainName(name, wire, 0, nil, false)
	if err != nil {
		panic(fmt.Sprintf("dnsd: zone %q passed validation: %v", name, err))
	}
	return zone{name: name, wire: wire[:n]}
}

// Serve answers on udp and tcp, of which either may be nil, until ctx is done or
// one of them fails. It closes both, waits for every connection's goroutine, and
// returns nil after the end of ctx.
func (s *Server) Serve(ctx context.Context, udp net.PacketConn, tcp net.Listener) error {
	group, ctx := errgroup.WithContext(ctx)
	if udp != nil {
		group.Go(func() error { return s.serveUDP(ctx, udp) })
	}
	if tcp != nil {
		group.Go(func() error { return s.serveTCP(ctx, tcp) })
	}
	return group.Wait()
}
