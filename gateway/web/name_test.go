package web

import (
	"strings"
	"testing"
)

func TestParseName(t *testing.T) {
	for host, want := range map[string]Name{
		"demo.helix.local":           {Host: "demo.helix.local", Workspace: "demo"},
		"DEMO.Helix.Local.":          {Host: "demo.helix.local", Workspace: "demo"},
		"demo.helix.local:8443":      {Host: "demo.helix.local", Workspace: "demo"},
		"demo.helix.local.:443":      {Host: "demo.helix.local", Workspace: "demo"},
		"5173.demo.helix.local":      {Host: "5173.demo.helix.local", Workspace: "demo", Port: 5173},
		"65535.demo.helix.local":     {Host: "65535.demo.helix.local", Workspace: "demo", Port: 65535},
		"65536.demo.helix.local":     {Host: "65536.demo.helix.local", Workspace: "demo", Service: "65536"},
		"080.demo.helix.local":       {Host: "080.demo.helix.local", Workspace: "demo", Service: "080"},
		"0.demo.helix.local":         {Host: "0.demo.helix.local", Workspace: "demo", Service: "0"},
		"web.demo.helix.local":       {Host: "web.demo.helix.local", Workspace: "demo", Service: "web"},
		"_x.demo.helix.internal":     {Host: "_x.demo.helix.internal", Workspace: "demo", Service: "_x"},
		"a.b.demo.helix.local":       {Host: "a.b.demo.helix.local", Workspace: "demo"},
		"1.2.demo.helix.local":       {Host: "1.2.demo.helix.local", Workspace: "demo"},
		"helix.local":                {Host: "helix.local"},
		"gw.helix.local":             {Host: "gw.helix.local", Workspace: "gw"},
		"helix.local.helix.internal": {Host: "helix.local.helix.internal", Workspace: "local", Service: "helix"},
	} {
		got, ok := ParseName(host, testZones)
		if !ok || got != want {
			t.Errorf("%q: got %+v, %v, want %+v", host, got, ok, want)
		}
	}
	for _, host := range []string{
		"", ".", "local", "example.com", "xhelix.local", ".helix.local", "a..helix.local", "-a.helix.local", "a-.helix.local",
		"a b.helix.local", "é.helix.local", "demo.helix.local:http", "demo.helix.local:", "[::1]:443", "::1", "127.88.0.5",
		"demo.helix.local..", strings.Repeat("a", 64) + ".helix.local", strings.Repeat("a.", 130) + "helix.local", "demo.helix.local:1:2",
	} {
		if got, ok := ParseName(host, testZones); ok {
			t.Errorf("%q: got %+v, want none", host, got)
		}
	}
}

func TestGatewayNames(t *testing.T) {
	for host, want := range map[string]bool{
		"helix.local": true, "gw.helix.local": true, "x.gw.helix.local": true, "gwx.helix.local": false, "gw.demo.helix.local": false,
	} {
		if n, ok := ParseName(host, testZones); !ok || n.Gateway() != want {
			t.Errorf("%s: got %v, want %v", host, n.Gateway(), want)
		}
	}
}

func TestUpstreamAddressSurvivesItsParser(t *testing.T) {
	for _, route := range []Route{
		{Workspace: "demo", Port: 80},
		{Workspace: "demo", Port: 65535, Pool: "vm-12"},
		{Workspace: "a-b", Port: 1, Pool: "x.y/z:1 ü"},
	} {
		workspace, port, err := splitUpstream(upstreamAddress(route))
		if err != nil || workspace != route.Workspace || port != route.Port {
			t.Errorf("%+v: got %q %d %v from %q", route, workspace, port, err, upstreamAddress(route))
		}
	}
	for _, bad := range []string{"", "demo", "demo:x", "demo:70000"} {
		if _, _, err := splitUpstream(bad); err == nil {
			t.Errorf("%q was taken", bad)
		}
	}
}

func FuzzParseName(f *testing.F) {
	for _, s := range []string{"demo.helix.local", "5173.demo.helix.local:443", "a.b.demo.helix.internal.", "[::1]:80", "gw.helix.local", "xn--a.helix.local"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, host string) {
		n, ok := ParseName(host, testZones)
		if !ok {
			if n != (Name{}) {
				t.Fatalf("%q: refused, but %+v", host, n)
			}
			return
		}
		again, ok := ParseName(n.Host, testZones)
		if !ok || again != n {
			t.Fatalf("%q: %+v, and its host gives %+v", host, n, again)
		}
		if n.Service != "" && n.Port != 0 {
			t.Fatalf("%q: both service and port: %+v", host, n)
		}
		if n.Workspace != "" && !strings.Contains(n.Host, n.Workspace+".") {
			t.Fatalf("%q: workspace %q is not in the name", host, n.Workspace)
		}
	})
}
