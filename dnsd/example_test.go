package dnsd_test

import (
	"context"
	"fmt"
	"net"
	"net/netip"

	"github.com/miekg/dns"
	"helix.local/helix/dnsd"
)

// One side of a gateway: one workspace, asked over UDP.
func Example() {
	s, err := dnsd.New(dnsd.Config{
		Zones: []string{"helix.local"},
		Lookup: func(host string) (dnsd.Answer, bool) {
			return dnsd.Answer{A: netip.MustParseAddr("127.88.0.2")}, host == "demo"
		},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var lc net.ListenConfig
	udp, err := lc.ListenPacket(ctx, "udp", "127.0.0.1:0")
	if err != nil {
		fmt.Println(err)
		return
	}
	ended := make(chan error)
	go func() { ended <- s.Serve(ctx, udp, nil) }()

	for _, name := range []string{"5173.demo.helix.local.", "nobody.helix.local."} {
		m, err := dns.Exchange(new(dns.Msg).SetQuestion(name, dns.TypeA), udp.LocalAddr().String())
		if err != nil {
			fmt.Println(err)
			continue
		}
		fmt.Println(dns.RcodeToString[m.Rcode], len(m.Answer))
	}
	cancel()
	fmt.Println(<-ended)
	// Output:
	// NOERROR 1
	// NXDOMAIN 0
	// <nil>
}
