//go:build linux

package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// dig asks the gateway's DNS.
func (g *gateway) dig(args ...string) string {
	g.t.Helper()
	host, port, _ := strings.Cut(g.info.DNS, ":")
	r := do(g.t, nil, nil, "dig", append([]string{"@" + host, "-p", port, "+time=2", "+tries=1"}, args...)...)
	if r.code != 0 {
		g.t.Fatalf("dig %v: %d %s", args, r.code, r.out)
	}
	return r.out
}

func TestDNS(t *testing.T) {
	g := startGateway(t)
	g.dir("demo")
	addr, zone := g.workspace("demo").Address, g.info.Zone
	for _, name := range []string{"demo." + zone, "demo.helix.internal", "DeMo." + zone, "a.b.demo." + zone, "5173.demo." + zone} {
		for _, transport := range []string{"+notcp", "+tcp"} {
			if got := strings.TrimSpace(g.dig("+short", transport, name)); got != addr {
				t.Errorf("%s %s: %q, want %s", name, transport, got, addr)
			}
		}
	}
	if got := strings.TrimSpace(g.dig("+short", "gw."+zone)); got != g.info.Address {
		t.Errorf("gw: %q, want %s", got, g.info.Address)
	}
	if got := strings.TrimSpace(g.dig("+short", "-x", addr)); got != "demo."+zone+"." {
		t.Errorf("reverse: %q", got)
	}
	status := map[string][]string{
		"NXDOMAIN": {"nobody." + zone},
		"REFUSED":  {"example.org"},
		"NOERROR":  {"demo." + zone, "AAAA"},
	}
	for want, args := range status {
		if out := g.dig(args...); !strings.Contains(out, "status: "+want) || want != "REFUSED" && !strings.Contains(out, "SOA") {
			t.Errorf("%v: want %s and a SOA:\n%s", args, want, out)
		}
	}
	if out := g.dig("TYPE65", "demo."+zone); !strings.Contains(out, "status: NOERROR") || !strings.Contains(out, "ANSWER: 0") {
		t.Errorf("HTTPS record:\n%s", out)
	}
	if out := g.dig("local.", "SOA"); !strings.Contains(out, "REFUSED") {
		t.Errorf("local. itself:\n%s", out)
	}
	began := time.Now()
	g.dig("+short", "demo."+zone, "A", "demo."+zone, "AAAA")
	t.Logf("A and AAAA with a process start: %s", time.Since(began))
	t.Run("changes are seen", func(t *testing.T) {
		for i := range 3 {
			name := fmt.Sprint("new", i)
			if out := g.dig(name + "." + zone); !strings.Contains(out, "NXDOMAIN") {
				t.Errorf("before: %s", out)
			}
			g.dir(name)
			if got := strings.TrimSpace(g.dig("+short", name+"."+zone)); got != g.workspace(name).Address {
				t.Errorf("after create: %q", got)
			}
			g.must("rm", name)
			if out := g.dig(name + "." + zone); !strings.Contains(out, "NXDOMAIN") {
				t.Errorf("after rm: %s", out)
			}
		}
	})
}
