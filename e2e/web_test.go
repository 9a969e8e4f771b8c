//go:build linux

package e2e

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
)

// curl runs curl with our CA.
func (g *gateway) curl(args ...string) result {
	g.t.Helper()
	return do(g.t, nil, nil, "curl", append([]string{"-sS", "--max-time", "60", "--cacert", g.info.Root}, args...)...)
}

// resolve tells curl what the gateway's DNS would.
func (g *gateway) resolve(host, addr string, port uint16) []string {
	return []string{"--resolve", fmt.Sprintf("%s:%d:%s", host, port, addr)}
}

// get is curl for one host name of a workspace.
func (g *gateway) get(name, child string, more ...string) result {
	g.t.Helper()
	host, addr := name+"."+g.info.Zone, g.info.Address
	for _, w := range g.list() {
		if w.Name == name {
			addr = w.Address
		}
	}
	if child != "" {
		host = child + "." + host
	}
	args := append(g.resolve(host, addr, g.info.HTTPS), more...)
	return g.curl(append(args, fmt.Sprintf("https://%s:%d/", host, g.info.HTTPS))...)
}

// testWeb is what must hold for every kind of target: a page that says who
// serves it, on the name, on the port's name, over plain HTTP, and a socket.
func testWeb(t *testing.T, g *gateway, name, body string, port uint16) {
	t.Helper()
	eventually(t, time.Minute, "page of "+name, func() bool { return g.get(name, "").out == body })
	for _, child := range []string{"", fmt.Sprint(port), "a.b"} {
		for _, version := range []string{"--http1.1", "--http2"} {
			if r := g.get(name, child, version); r.code != 0 || r.out != body {
				t.Errorf("https %s %s %s: exit %d, %q %q", child, name, version, r.code, r.out, r.err)
			}
		}
	}
	w := g.workspace(name)
	args := append(g.resolve(w.Hostname, w.Address, g.info.HTTP), fmt.Sprintf("http://%s:%d/", w.Hostname, g.info.HTTP))
	if r := g.curl(args...); r.out != body {
		t.Errorf("http: %q %q", r.out, r.err)
	}
	args = append(g.resolve(w.Hostname, w.Address, port), fmt.Sprintf("http://%s:%d/", w.Hostname, port))
	if r := g.curl(args...); r.out != body {
		t.Errorf("the port itself: %q %q", r.out, r.err)
	}
}

// client is an HTTP client of Go's own stack with our CA alone.
func (g *gateway) client(addr string) *http.Client {
	g.t.Helper()
	pem, err := os.ReadFile(g.info.Root)
	if err != nil {
		g.t.Fatal(err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		g.t.Fatal("no certificate in " + g.info.Root)
	}
	transport := &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: roots},
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, network, addr)
		},
	}
	g.t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

func TestWebSocketThroughCaddy(t *testing.T) {
	g := startGateway(t)
	g.dir("demo")
	ws := g.workspace("demo")
	// The server stands in the workspace: peer speaks it on its "socket" port.
	g.peer("demo", "socket=$HELIX_ADDR:7007")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c, _, err := websocket.Dial(ctx, fmt.Sprintf("wss://7007.%s:%d/", ws.Hostname, g.info.HTTPS), &websocket.DialOptions{
		HTTPClient: g.client(fmt.Sprintf("%s:%d", ws.Address, g.info.HTTPS)),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer c.CloseNow()
	for i := range 20 {
		text := fmt.Sprint("message ", i)
		if err := c.Write(ctx, websocket.MessageText, []byte(text)); err != nil {
			t.Fatal(err)
		}
		if _, got, err := c.Read(ctx); err != nil || string(got) != text {
			t.Fatalf("echo of %q: %q, %v", text, got, err)
		}
		if i == 10 { // other workspaces come and go without touching it
			for n := range 5 {
				g.dir(fmt.Sprint("other", n))
				g.must("rm", fmt.Sprint("other", n))
			}
		}
	}
}

func TestErrorPagesTellStatesApart(t *testing.T) {
	g := startGateway(t)
	g.dir("demo")
	g.dir("off")
	g.must("stop", "off")
	cases := map[string]struct {
		name, child, reason string
		status              int
	}{
		"unknown": {"nobody", "", "unknown-workspace", 404},
		"stopped": {"off", "", "stopped", 503},
		"nothing": {"demo", "", "refused", 502},
		"refused": {"demo", "9", "refused", 502},
	}
	for what, c := range cases {
		r := g.get(c.name, c.child, "-i", "--http1.1")
		head, page, _ := strings.Cut(r.out, "\r\n\r\n")
		if !strings.Contains(head, fmt.Sprintf("HTTP/1.1 %d", c.status)) || !strings.Contains(strings.ToLower(head), "x-helix-reason: "+c.reason) {
			t.Errorf("%s: %q %q", what, head, r.err)
		}
		if !strings.Contains(page, c.name) {
			t.Errorf("%s: the page does not name the workspace: %.300q", what, page)
		}
	}
}

func TestTwoDirectoriesOnOnePort(t *testing.T) {
	g := startGateway(t)
	for _, name := range []string{"one", "two"} {
		folder := g.dir(name)
		if err := os.WriteFile(filepath.Join(folder, "index.html"), []byte(name), 0o644); err != nil {
			t.Fatal(err)
		}
		g.must("exec", name, "--", "sh", "-c", `busybox httpd -p "$HELIX_ADDR:8080"`)
	}
	for _, name := range []string{"one", "two"} {
		testWeb(t, g, name, name, 8080)
	}
	t.Run("refused is a reset", func(t *testing.T) {
		r := g.curl(fmt.Sprintf("http://%s:8099/", g.workspace("one").Address))
		if r.code != 7 {
			t.Errorf("exit %d (7 is: could not connect): %s", r.code, r.err)
		}
	})
	t.Run("a port that closes", func(t *testing.T) {
		addr := g.workspace("one").Address
		g.must("exec", "one", "--", "sh", "-c", "pkill -f '[h]ttpd -p' || true; true")
		eventually(t, 10*time.Second, "refusal", func() bool { return g.curl("http://"+addr+":8080/").code == 7 })
	})
}
