package dnsd

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/miekg/dns"
	"go.uber.org/goleak"
)

var update = flag.Bool("update", false, "rewrite testdata/*.golden")

// serveEnv makes this test binary the server that the load test measures.
const serveEnv = "DNSD_SERVE"

func TestMain(m *testing.M) {
	if addr := os.Getenv(serveEnv); addr != "" {
		if err := serveForLoad(addr); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	flag.Parse()
	goleak.VerifyTestMain(m)
}

// testHosts is what the servers of most tests answer from.
func testHosts(host string) (Answer, bool) {
	switch host {
	case "gw":
		return Answer{A: netip.MustParseAddr("127.88.0.1")}, true
	case "demo":
		return Answer{A: netip.MustParseAddr("127.88.0.2")}, true
	case "both":
		return Answer{A: netip.MustParseAddr("10.1.2.3"), AAAA: netip.MustParseAddr("fd00::3")}, true
	case "bare":
		return Answer{}, true
	}
	return Answer{}, false
}

func testReverse(addr netip.Addr) (string, bool) {
	switch addr.String() {
	case "127.88.0.2":
		return "demo", true
	case "fd00:1::2":
		return "both", true
	}
	return "", false
}

func newServer(t testing.TB) *Server {
	t.Helper()
	s, err := New(Config{
		Zones:    []string{"helix.local", "helix.internal"},
		Lookup:   testHosts,
		Networks: []netip.Prefix{netip.MustParsePrefix("127.88.0.0/16"), netip.MustParsePrefix("fd00:1::/64")},
		Reverse:  testReverse,
	})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// serve runs s on a port of its own until the test ends, and returns address and
// port, the same for UDP and TCP.
func serve(t testing.TB, s *Server) string {
	t.Helper()
	var lc net.ListenConfig
	var udp net.PacketConn
	var tcp net.Listener
	for tcp == nil { // a port that is free for UDP may be somebody's for TCP
		var err error
		if udp, err = lc.ListenPacket(t.Context(), "udp", "127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
		if tcp, err = lc.Listen(t.Context(), "tcp", udp.LocalAddr().String()); err != nil {
			if !errors.Is(err, syscall.EADDRINUSE) {
				t.Fatal(err)
			}
			tcp = nil
			_ = udp.Close() // the next one then
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(ctx, udp, tcp) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	return udp.LocalAddr().String()
}

func dial(t testing.TB, network, addr string) net.Conn {
	t.Helper()
	var d net.Dialer
	c, err := d.DialContext(t.Context(), network, addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func question(t testing.TB, name string, qtype uint16) []byte {
	t.Helper()
	m := new(dns.Msg).SetQuestion(name, qtype)
	m.Id = 1
	packed, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	return packed
}

func unpack(t testing.TB, data []byte) *dns.Msg {
	t.Helper()
	m := new(dns.Msg)
	if err := m.Unpack(data); err != nil {
		t.Fatalf("answer does not unpack: %v\n%x", err, data)
	}
	return m
}

// text is m without its random parts, one record a line.
func text(m *dns.Msg) string {
	var lines []string
	for _, l := range strings.Split(m.String(), "\n") {
		if l != "" && l != ";; OPT PSEUDOSECTION:" {
			lines = append(lines, strings.ReplaceAll(l, "\t", " "))
		}
	}
	return strings.Join(lines, "\n") + "\n"
}
