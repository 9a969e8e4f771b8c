package guest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// NetDevice is where the kernel shows the network card.
const NetDevice = "/sys/class/net/" + netDevice

const (
	netDevice = "eth0"
	netTime   = 5 * time.Second // for the device to appear
	leaseTime = 30 * time.Second
)

// ErrNoNetwork reports a machine without a network card.
var ErrNoNetwork = errors.New("no network card")

// Loopback brings lo up.
func Loopback() error {
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.LinkSetUp(lo)
	}
	if err != nil {
		return fmt.Errorf("bring loopback up: %w", err)
	}
	return nil
}

// Lease is what the network was configured with.
type Lease struct {
	Address string // with prefix length
	Router  string // "" for none
	MTU     int    // 0 for the card's own
	DNS     []string
}

// Configure brings the network card up by DHCP and writes resolv.conf below
// etc, usually "/etc".
func Configure(ctx context.Context, etc string) (Lease, error) {
	if !hasVirtio("/sys", virtioNet) {
		return Lease{}, ErrNoNetwork
	}
	ctx, cancel := context.WithTimeout(ctx, leaseTime)
	defer cancel()
	appear, stop := context.WithTimeout(ctx, netTime)
	defer stop()
	err := Await(appear, NetDevice, nil)
	var lease Lease
	if err == nil {
		lease, err = configure(ctx, etc)
	}
	if err != nil {
		return Lease{}, fmt.Errorf("configure %s: %w", netDevice, err)
	}
	return lease, nil
}

func configure(ctx context.Context, etc string) (Lease, error) {
	link, err := netlink.LinkByName(netDevice)
	if err != nil {
		return Lease{}, fmt.Errorf("find the card: %w", err)
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return Lease{}, fmt.Errorf("bring the card up: %w", err)
	}
	lease, err := ask(ctx)
	if err != nil {
		return Lease{}, err
	}
	return lease, apply(link, lease, etc)
}

// ask gets a lease. The server is on the same machine, so a lost packet means
// that it was not there yet: ask again soon. The lease is not renewed; the
// address belongs to this machine as long as it runs.
func ask(ctx context.Context) (Lease, error) {
	client, err := nclient4.New(netDevice, nclient4.WithTimeout(250*time.Millisecond), nclient4.WithRetry(100))
	if err != nil {
		return Lease{}, fmt.Errorf("ask for an address: %w", err)
	}
	lease, err := client.Request(ctx, dhcpv4.WithRequestedOptions(dhcpv4.OptionInterfaceMTU))
	if err = errors.Join(err, client.Close()); err != nil {
		return Lease{}, fmt.Errorf("ask for an address: %w", err)
	}
	return parseLease(lease.ACK)
}

func parseLease(ack *dhcpv4.DHCPv4) (Lease, error) {
	mask := ack.SubnetMask()
	ones, bits := mask.Size()
	if ack.YourIPAddr.To4() == nil || ack.YourIPAddr.IsUnspecified() || bits != 32 {
		return Lease{}, errors.New("read lease: no address in it")
	}
	lease := Lease{Address: fmt.Sprintf("%s/%d", ack.YourIPAddr, ones)}
	if routers := ack.Router(); len(routers) > 0 {
		lease.Router = routers[0].String()
	}
	if mtu, err := dhcpv4.GetUint16(dhcpv4.OptionInterfaceMTU, ack.Options); err == nil && mtu >= 576 {
		lease.MTU = int(mtu)
	}
	for _, server := range ack.DNS() {
		lease.DNS = append(lease.DNS, server.String())
	}
	return lease, nil
}

func apply(link netlink.Link, lease Lease, etc string) error {
	if lease.MTU != 0 {
		if err := netlink.LinkSetMTU(link, lease.MTU); err != nil {
			return fmt.Errorf("set mtu %d: %w", lease.MTU, err)
		}
	}
	addr, err := netlink.ParseAddr(lease.Address)
	if err != nil {
		return fmt.Errorf("parse address: %w", err)
	}
	if err := netlink.AddrReplace(link, addr); err != nil {
		return fmt.Errorf("set address %s: %w", lease.Address, err)
	}
	if lease.Router != "" {
		route := &netlink.Route{LinkIndex: link.Attrs().Index, Gw: net.ParseIP(lease.Router)}
		if err := netlink.RouteReplace(route); err != nil {
			return fmt.Errorf("set route by %s: %w", lease.Router, err)
		}
	}
	if err := os.WriteFile(etc+"/resolv.conf", []byte(resolvConf(lease.DNS)), 0o644); err != nil { //nolint:gosec // for everybody
		return fmt.Errorf("set name servers: %w", err)
	}
	return nil
}

func resolvConf(servers []string) string {
	var text strings.Builder
	for _, s := range servers {
		text.WriteString("nameserver " + s + "\n")
	}
	return text.String()
}

// CheckNetwork reports what differs from lease now.
func CheckNetwork(lease Lease) error {
	link, err := netlink.LinkByName(netDevice)
	if err != nil {
		return fmt.Errorf("look at %s: %w", netDevice, err)
	}
	if link.Attrs().Flags&net.FlagUp == 0 {
		return fmt.Errorf("%s is down", netDevice)
	}
	addrs, err := netlink.AddrList(link, unix.AF_INET)
	if err != nil {
		return fmt.Errorf("look at %s: %w", netDevice, err)
	}
	found := false
	for _, a := range addrs {
		found = found || a.IPNet.String() == lease.Address
	}
	if !found {
		return fmt.Errorf("%s has lost its address %s", netDevice, lease.Address)
	}
	if lease.Router == "" {
		return nil
	}
	routes, err := netlink.RouteListFiltered(unix.AF_INET, &netlink.Route{Gw: net.ParseIP(lease.Router)}, netlink.RT_FILTER_GW)
	if err != nil {
		return fmt.Errorf("look at routes: %w", err)
	}
	if len(routes) == 0 {
		return fmt.Errorf("no default route by %s", lease.Router)
	}
	return nil
}

// SetHostname names the machine and lets it find itself; its files are below
// etc, usually "/etc".
func SetHostname(name, zone, etc string) error {
	if err := unix.Sethostname([]byte(name)); err != nil {
		return fmt.Errorf("set host name: %w", err)
	}
	if err := os.WriteFile(etc+"/hostname", []byte(name+"\n"), 0o644); err != nil { //nolint:gosec // for everybody
		return fmt.Errorf("set host name: %w", err)
	}
	if err := os.WriteFile(etc+"/hosts", []byte(hosts(name, zone)), 0o644); err != nil { //nolint:gosec // for everybody
		return fmt.Errorf("set host name: %w", err)
	}
	return nil
}

func hosts(name, zone string) string {
	full := name
	if zone != "" {
		full = name + "." + zone + " " + name
	}
	return "127.0.0.1 localhost\n::1 localhost\n127.0.1.1 " + full + "\n"
}
