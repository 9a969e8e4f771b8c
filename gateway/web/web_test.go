package web

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fixture is a Server with listeners on loopback and a registry of upstreams
// that are real servers.
type fixture struct {
	t      testing.TB
	server *Server
	ca     *CA
	state  string
	https  string // host:port
	http   string
	stop   func() // ends Run and waits; may be called once before the test's end

	mu     sync.Mutex
	routes map[string]Route  // by workspace
	fails  map[string]error  // by workspace, from Resolve
	addrs  map[string]string // by workspace:port, where Dial goes
	dials  map[string]error
	count  int // dials made
}

var testZones = []string{"helix.local", "helix.internal"}

func newFixture(t testing.TB, change ...func(*Config)) *fixture {
	t.Helper()
	f := &fixture{
		t: t, state: t.TempDir(),
		routes: map[string]Route{}, fails: map[string]error{}, addrs: map[string]string{}, dials: map[string]error{},
	}
	var err error
	if f.ca, err = OpenCA(filepath.Join(f.state, "ca"), testZones, nil); err != nil {
		t.Fatal(err)
	}
	cfg := Config{
		Zones: testZones, CA: f.ca, Storage: filepath.Join(f.state, "certs"),
		Resolve: f.resolve, Dial: f.dial, Grace: 2 * time.Second,
		Gateway: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "gateway\n") }),
		Log:     slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn})),
	}
	for _, c := range change {
		c(&cfg)
	}
	if f.server, err = New(cfg); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := f.server.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	f.https = serveOn(t, &running, func(c net.Conn) { _ = f.server.ServeTLS(ctx, c) })
	f.http = serveOn(t, &running, func(c net.Conn) { _ = f.server.ServePlain(ctx, c) })
	var once sync.Once
	f.stop = func() {
		once.Do(func() {
			cancel()
			f.closeListeners()
			running.Wait()
		})
	}
	t.Cleanup(f.stop)
	select {
	case <-f.server.Ready():
	case <-t.Context().Done():
		t.Fatal("not ready")
	}
	return f
}

// listeners are closed by stop; serveOn registers them here.
var listeners sync.Map

func (f *fixture) closeListeners() {
	for _, addr := range []string{f.http, f.https} {
		if ln, ok := listeners.LoadAndDelete(addr); ok {
			_ = ln.(net.Listener).Close()
		}
	}
}

func serveOn(t testing.TB, running *sync.WaitGroup, hand func(net.Conn)) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	listeners.Store(ln.Addr().String(), ln)
	running.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			hand(c)
		}
	})
	return ln.Addr().String()
}

func (f *fixture) resolve(n Name) (Route, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.fails[n.Workspace]; err != nil {
		return Route{}, err
	}
	route, ok := f.routes[n.Workspace]
	if !ok {
		return Route{}, &RouteError{Reason: ReasonUnknownWorkspace, Nearest: "demo"}
	}
	switch {
	case n.Port != 0:
		route.Port = n.Port
	case n.Service != "" && n.Service != "web":
		return Route{}, &RouteError{Reason: ReasonUnknownService, Workspace: n.Workspace}
	}
	return route, nil
}

func (f *fixture) dial(ctx context.Context, workspace string, port uint16) (net.Conn, error) {
	key := net.JoinHostPort(workspace, strconv.Itoa(int(port)))
	f.mu.Lock()
	f.count++
	addr, err := f.addrs[key], f.dials[key]
	f.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if addr == "" {
		return nil, &RouteError{Reason: ReasonRefused, Workspace: workspace, Port: port, Ports: []uint16{80, 5173}}
	}
	var d net.Dialer
	return d.DialContext(ctx, "tcp", addr)
}

// add makes workspace lead to the server at addr.
func (f *fixture) add(workspace string, port uint16, p Protocol, addr string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, ok := f.routes[workspace]; !ok {
		f.routes[workspace] = Route{Workspace: workspace, Port: port, Protocol: p}
	}
	f.addrs[net.JoinHostPort(workspace, strconv.Itoa(int(port)))] = addr
}

func (f *fixture) remove(workspace string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.routes, workspace)
}

func (f *fixture) set(fn func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	fn()
}

// serve starts an HTTP server and makes workspace lead to it on port 80.
func (f *fixture) serve(workspace string, h http.HandlerFunc) *httptest.Server {
	f.t.Helper()
	s := httptest.NewServer(h)
	f.t.Cleanup(s.Close)
	f.add(workspace, 80, ProtocolHTTP, s.Listener.Addr().String())
	return s
}

// client trusts the fixture's CA and finds every name at its listeners.
func (f *fixture) client(change ...func(*http.Transport)) *http.Client {
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(f.ca.RootPEM())
	tr := &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: pool},
		DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
			var d net.Dialer
			if _, port, _ := net.SplitHostPort(addr); port == "80" {
				return d.DialContext(ctx, "tcp", f.http)
			}
			return d.DialContext(ctx, "tcp", f.https)
		},
		ForceAttemptHTTP2: true,
	}
	for _, c := range change {
		c(tr)
	}
	f.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

func (f *fixture) get(c *http.Client, target string, header ...string) (*http.Response, string) {
	f.t.Helper()
	r, err := http.NewRequestWithContext(f.t.Context(), http.MethodGet, target, nil)
	if err != nil {
		f.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	if r.Header.Get("Host") != "" {
		r.Host = r.Header.Get("Host")
	}
	resp, err := c.Do(r)
	if err != nil {
		f.t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		f.t.Fatal(err)
	}
	return resp, string(body)
}

func hello(text string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, text+" "+r.Host+" "+r.URL.RequestURI())
	}
}

func TestServesEachNameOfAWorkspace(t *testing.T) {
	f := newFixture(t)
	f.serve("demo", hello("main"))
	other := httptest.NewServer(hello("vite"))
	defer other.Close()
	f.add("demo", 5173, ProtocolHTTP, other.Listener.Addr().String())
	c := f.client()
	for target, want := range map[string]string{
		"https://demo.helix.local/a?b=c":    "main demo.helix.local /a?b=c",
		"https://DEMO.helix.local/":         "main DEMO.helix.local /",
		"https://web.demo.helix.local/":     "main web.demo.helix.local /",
		"https://5173.demo.helix.local/x":   "vite 5173.demo.helix.local /x",
		"https://a.b.demo.helix.local/":     "main a.b.demo.helix.local /",
		"https://demo.helix.internal/":      "main demo.helix.internal /",
		"http://demo.helix.local/":          "main demo.helix.local /",
		"http://5173.demo.helix.local/":     "vite 5173.demo.helix.local /",
		"https://gw.helix.local/":           "gateway\n",
		"https://helix.local/":              "gateway\n",
		"https://demo.helix.local:10443/":   "main demo.helix.local:10443 /",
		"https://5173.demo.helix.internal/": "vite 5173.demo.helix.internal /",
	} {
		t.Run(target, func(t *testing.T) {
			resp, body := f.get(c, target)
			if resp.StatusCode != http.StatusOK || body != want {
				t.Fatalf("got %s %q, want %q", resp.Status, body, want)
			}
			if u, _ := url.Parse(target); u.Scheme == "https" && resp.ProtoMajor != 2 {
				t.Errorf("got %s, want HTTP/2", resp.Proto)
			}
		})
	}
}

func TestRunReportsWhatCaddyRefuses(t *testing.T) {
	f := newFixture(t)
	s, err := New(f.server.cfg)
	if err != nil {
		t.Fatal(err)
	}
	s.cfg.Grace = -time.Hour // the Caddyfile's grammar knows no such grace
	s.id = "no such instance\n}"
	if err := s.Run(t.Context()); err == nil {
		t.Fatal("a broken configuration was run")
	}
	if err := s.ServeTLS(t.Context(), nopConn{}); !errors.Is(err, ErrClosed) {
		t.Fatalf("got %v, want ErrClosed", err)
	}
}

type nopConn struct{ net.Conn }

func (nopConn) Close() error { return nil }
