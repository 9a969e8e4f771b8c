package guestnet

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
)

// Policy says what a guest may reach beyond its gateway.
type Policy string

// The policies. Whatever the policy, the guest reaches its gateway's fast link.
const (
	PolicyNone     Policy = "none"     // nothing, no name service either
	PolicyInternet Policy = "internet" // public unicast addresses
)

// Validate reports a policy that cannot be selected.
func (p Policy) Validate() error {
	if p == PolicyNone || p == PolicyInternet {
		return nil
	}
	return fmt.Errorf("network policy %q is not one of none, internet", string(p))
}

// ErrDenied reports an address that the policy does not let a guest reach.
var ErrDenied = errors.New("denied by network policy")

// special are the ranges that are never public unicast, from the IANA special
// purpose registries (RFC 6890 and its updates).
func special() []netip.Prefix {
	texts := []string{
		"0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16",
		"172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24",
		"192.88.99.0/24", "192.168.0.0/16", "192.175.48.0/24", "198.18.0.0/15", "198.51.100.0/24",
		"203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4", "255.255.255.255/32",
		// Outside of 2000::/3 nothing is public; inside, these are not either.
		"::/3", "4000::/2", "8000::/1", "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20",
		"168.63.129.16/32", // a cloud's metadata service that hides among public addresses
	}
	list := make([]netip.Prefix, 0, len(texts))
	for _, t := range texts {
		list = append(list, netip.MustParsePrefix(t))
	}
	return list
}

// rules is a policy made ready to judge addresses.
type rules struct {
	policy  Policy
	special []netip.Prefix
	host    func() ([]netip.Prefix, error) // networks the host is in
}

// check judges one address as it is about to be dialled. When the host's own
// addresses cannot be read, nothing is allowed.
func (r rules) check(addr netip.Addr) error {
	addr = addr.Unmap().WithZone("")
	if r.policy != PolicyInternet {
		return fmt.Errorf("%s: %w %q", addr, ErrDenied, r.policy)
	}
	if !addr.IsValid() || slices.ContainsFunc(r.special, func(p netip.Prefix) bool { return p.Contains(addr) }) {
		return fmt.Errorf("%s is not a public address: %w", addr, ErrDenied)
	}
	own, err := r.host()
	if err != nil {
		return fmt.Errorf("%s: %w: %w", addr, ErrDenied, err)
	}
	if slices.ContainsFunc(own, func(p netip.Prefix) bool { return p.Contains(addr) }) {
		return fmt.Errorf("%s is in a network of the host: %w", addr, ErrDenied)
	}
	return nil
}

// hostNetworks lists the networks of the host's interfaces: a local network is
// local also where its addresses are public ones.
func hostNetworks() ([]netip.Prefix, error) {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("read the host's addresses: %w", err)
	}
	list := make([]netip.Prefix, 0, len(addrs))
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			list = append(list, netip.PrefixFrom(p.Addr().Unmap(), p.Bits()).Masked())
		}
	}
	return list, nil
}
