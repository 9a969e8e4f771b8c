package web

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"helix.local/helix/gateway/front"
)

// relay is the tunnel's part, in its plainest form.
func relay(_ context.Context, a, b front.Conn) error {
	var wait sync.WaitGroup
	half := func(dst, src front.Conn) {
		_, _ = io.Copy(dst, src)
		_ = dst.CloseWrite()
	}
	wait.Go(func() { half(a, b) })
	wait.Go(func() { half(b, a) })
	wait.Wait()
	_ = a.Close()
	return b.Close()
}

// The whole way of a connection to port 443, as the gateway puts it together:
// listener, server name, then Caddy or the service's own TLS.
func TestBehindTheFront(t *testing.T) {
	f := newFixture(t)
	f.serve("demo", func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		_, _ = io.WriteString(w, r.Header.Get("X-Forwarded-For")+" "+string(body))
	})
	own := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, "own "+r.Host) }))
	defer own.Close()
	sni := front.NewSNI(front.SNIConfig{
		Passthrough: func(name string) (front.Dial, bool) {
			return func(ctx context.Context) (front.Conn, error) {
				var d net.Dialer
				c, err := d.DialContext(ctx, "tcp", own.Listener.Addr().String())
				if err != nil {
					return nil, err
				}
				return c.(*net.TCPConn), nil
			}, name == "own.helix.local"
		},
		Relay:     relay,
		Terminate: func(ctx context.Context, c front.Conn) { _ = f.server.ServeTLS(ctx, c) },
	})
	set := front.New(front.Config{Grace: time.Second, Handle: func(ctx context.Context, c *net.TCPConn, _ front.Local) { sni.Handle(ctx, c) }})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	for _, run := range []func(context.Context) error{sni.Run, set.Run} {
		running.Go(func() {
			if err := run(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	res, err := set.Open(ctx, netip.MustParseAddrPort("127.0.0.1:0"), front.RoleHTTPS, 0)
	if err != nil {
		t.Fatal(err)
	}
	to := []string{"--connect-to", "::" + res.Got.String()}
	body := strings.Repeat("x", 100_000)
	for _, version := range []string{"--http1.1", "--http2"} {
		out, err := f.curl(append(to, version, "--data", body, "https://demo.helix.local/")...)
		if err != nil || out != "127.0.0.1 "+body {
			t.Errorf("%s: got %d bytes, %v", version, len(out), err)
		}
	}
	c := tls.Client(dialRaw(t, res.Got.String()), &tls.Config{InsecureSkipVerify: true, ServerName: "own.helix.local"})
	if err := c.HandshakeContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := c.ConnectionState().PeerCertificates[0]; !got.Equal(own.Certificate()) {
		t.Errorf("got a certificate for %v, want the service's", got.DNSNames)
	}
	_ = c.Close()
	out, err := f.curl(append(to, "-k", "https://own.helix.local/")...)
	if err != nil || out != "own own.helix.local" {
		t.Errorf("got %q, %v", out, err)
	}
}
