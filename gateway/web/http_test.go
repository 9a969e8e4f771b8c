package web

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
)

// curl runs the real client against the fixture, trusting its CA.
func (f *fixture) curl(args ...string) (string, error) {
	f.t.Helper()
	base := []string{"-sS", "--max-time", "20", "--cacert", f.ca.RootPath()}
	if !slices.Contains(args, "--connect-to") {
		base = append(base, "--connect-to", "::"+f.https)
	}
	var stderr bytes.Buffer
	cmd := exec.CommandContext(f.t.Context(), "curl", append(base, args...)...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("curl %s: %w: %s", strings.Join(args, " "), err, stderr.String())
	}
	return string(out), err
}

func TestCurlVerifiesCertificatesOverHTTP1AndHTTP2(t *testing.T) {
	f := newFixture(t)
	f.serve("demo", hello("main"))
	for _, version := range []string{"--http1.1", "--http2"} {
		for _, host := range []string{"demo.helix.local", "80.demo.helix.local", "a.b.demo.helix.internal"} {
			out, err := f.curl(version, "-w", " %{http_version}", "https://"+host+"/p")
			want := fmt.Sprintf("main %s /p %s", host, map[string]string{"--http1.1": "1.1", "--http2": "2"}[version])
			if err != nil || out != want {
				t.Errorf("got %q, %v, want %q", out, err, want)
			}
		}
	}
	if _, err := f.curl("https://demo.example.com/"); err == nil {
		t.Error("a name outside of the zones got a certificate")
	}
	if _, err := f.curl("-k", "https://127.88.0.5/"); err != nil {
		t.Errorf("no server name: %v", err)
	}
}

func TestForwardedHeadersAreOurs(t *testing.T) {
	f := newFixture(t)
	f.serve("demo", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Helix-Reason", "stopped")
		for key, want := range map[string]string{
			"X-Forwarded-For": "127.0.0.1", "X-Forwarded-Proto": "https", "X-Forwarded-Host": "demo.helix.local:10443", "X-Forwarded-Port": "10443",
			"X-Forwarded-Prefix": "", "Forwarded": "", "X-Real-Ip": "", "X-Custom": "kept",
		} {
			if got := strings.Join(r.Header.Values(key), "|"); got != want {
				t.Errorf("%s: got %q, want %q", key, got, want)
			}
		}
	})
	out, err := f.curl("-o", "/dev/null", "-w", "%{http_code}%header{x-helix-reason}",
		"-H", "X-Forwarded-For: 6.6.6.6", "-H", "X-Forwarded-Proto: gopher", "-H", "X-Forwarded-Host: evil", "-H", "X-Forwarded-Port: 1",
		"-H", "X-Forwarded-Prefix: /evil", "-H", "Forwarded: for=6.6.6.6", "-H", "X-Real-IP: 6.6.6.6", "-H", "X-Custom: kept",
		"https://demo.helix.local:10443/")
	if err != nil || out != "200" {
		t.Fatalf("got %q, %v", out, err)
	}
}

// A browser that reuses a connection for a name of another workspace gets 421
// and asks again on a connection of its own.
func TestMisdirectedRequest(t *testing.T) {
	f := newFixture(t)
	f.serve("demo", hello("demo"))
	f.serve("other", hello("other"))
	c := f.client()
	for host, want := range map[string]int{
		"other.helix.local": 421, "gw.helix.local": 421, "80.demo.helix.local": 200, "demo.helix.internal": 200, "demo.helix.local": 200,
	} {
		resp, _ := f.get(c, "https://demo.helix.local/", "Host", host)
		if resp.StatusCode != want || (want == 421) != (resp.Header.Get("X-Helix-Reason") == string(ReasonMisdirected)) {
			t.Errorf("%s: got %s %q", host, resp.Status, resp.Header.Get("X-Helix-Reason"))
		}
	}
}

func TestServerSentEventsArriveAtOnce(t *testing.T) {
	f := newFixture(t)
	next := make(chan struct{})
	for kind, contentType := range map[string]string{"sse": "text/event-stream", "ndjson": "application/x-ndjson", "gz": "application/gzip"} {
		f.serve(kind, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", contentType)
			rc := http.NewResponseController(w)
			for i := range 5 {
				_, _ = fmt.Fprintf(w, "data: %d\n", i)
				_ = rc.Flush()
				select { // the next event is sent after this one was seen
				case <-next:
				case <-r.Context().Done():
					return
				}
			}
		})
		for _, scheme := range []string{"https", "http"} {
			resp, err := f.client().Get(scheme + "://" + kind + ".helix.local/")
			if err != nil {
				t.Fatal(err)
			}
			lines := bufio.NewScanner(resp.Body)
			for i := range 5 {
				if !lines.Scan() || lines.Text() != fmt.Sprintf("data: %d", i) {
					t.Fatalf("%s event %d: got %q, %v", kind, i, lines.Text(), lines.Err())
				}
				next <- struct{}{}
			}
			_ = resp.Body.Close()
		}
	}
}

func TestExpectContinueAndBodiesAreNotBuffered(t *testing.T) {
	f := newFixture(t)
	var asked atomic.Int32
	f.serve("demo", func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/refuse" {
			w.WriteHeader(http.StatusExpectationFailed)
			return
		}
		asked.Add(1)
		first := make([]byte, 5)
		_, _ = io.ReadFull(r.Body, first)
		_ = http.NewResponseController(w).EnableFullDuplex()
		_, _ = w.Write(first)
		_ = http.NewResponseController(w).Flush()
		_, _ = io.Copy(w, r.Body)
	})
	body := strings.Repeat("x", 1<<20)
	for _, version := range []string{"--http1.1", "--http2"} {
		cmd := exec.CommandContext(t.Context(), "curl", "-sS", version, "--cacert", f.ca.RootPath(), "--connect-to", "::"+f.https,
			"-H", "Expect: 100-continue", "--data-binary", "@-", "https://demo.helix.local/")
		cmd.Stdin = strings.NewReader(body)
		out, err := cmd.Output()
		if err != nil || string(out) != body {
			t.Errorf("%s: got %d bytes, %v", version, len(out), err)
		}
	}
	// The body's first bytes reach the service while the client still has the
	// rest: over HTTP/2 the answer comes back before the request ends.
	r, w := io.Pipe()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "https://demo.helix.local/", r)
	if err != nil {
		t.Fatal(err)
	}
	go func() { _, _ = io.WriteString(w, "first") }()
	resp, err := f.client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 5)
	if _, err := io.ReadFull(resp.Body, got); err != nil || string(got) != "first" {
		t.Fatalf("got %q, %v", got, err)
	}
	if _, err := io.WriteString(w, "second"); err != nil {
		t.Fatal(err)
	}
	_ = w.Close()
	if rest, err := io.ReadAll(resp.Body); err != nil || string(rest) != "second" {
		t.Fatalf("got %q, %v", rest, err)
	}
	_ = resp.Body.Close()
}

// Upstreams that close idle connections after their own short time are common.
func TestIdleUpstreamConnectionClosedByTheService(t *testing.T) {
	f := newFixture(t)
	closed := make(chan struct{}, 100)
	s := httptest.NewUnstartedServer(hello("x"))
	s.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateClosed {
			closed <- struct{}{}
		}
	}
	s.Start()
	defer s.Close()
	f.add("demo", 80, ProtocolHTTP, s.Listener.Addr().String())
	c := f.client()
	for i := range 20 {
		if resp, body := f.get(c, "https://demo.helix.local/"); resp.StatusCode != 200 {
			t.Fatalf("request %d: %s %s", i, resp.Status, body)
		}
		s.CloseClientConnections()
		if i%2 == 0 { // the others race with the end of the connection
			<-closed
		}
	}
}

func TestUpstreamProtocols(t *testing.T) {
	f := newFixture(t)
	show := func(w http.ResponseWriter, r *http.Request) { _, _ = fmt.Fprint(w, r.Proto, " ", r.TLS != nil) }
	secure := httptest.NewUnstartedServer(http.HandlerFunc(show))
	secure.EnableHTTP2 = true
	secure.StartTLS()
	defer secure.Close()
	h2c := httptest.NewUnstartedServer(http.HandlerFunc(show))
	h2c.Config.Protocols = new(http.Protocols)
	h2c.Config.Protocols.SetUnencryptedHTTP2(true)
	h2c.Config.Protocols.SetHTTP1(true)
	h2c.Start()
	defer h2c.Close()
	f.serve("plain", show)
	f.add("secure", 443, ProtocolHTTPS, secure.Listener.Addr().String())
	f.add("tls", 443, ProtocolTLS, secure.Listener.Addr().String())
	f.add("h2c", 50051, ProtocolH2C, h2c.Listener.Addr().String())
	c := f.client()
	for name, want := range map[string]string{"plain": "HTTP/1.1 false", "secure": "HTTP/2.0 true", "tls": "HTTP/2.0 true", "h2c": "HTTP/2.0 false"} {
		if _, body := f.get(c, "https://"+name+".helix.local/"); body != want {
			t.Errorf("%s: got %q, want %q", name, body, want)
		}
	}
}

// A name that leads to another target must not be answered by the old one
// over a connection that was kept.
func TestPoolKeepsTargetsApart(t *testing.T) {
	f := newFixture(t)
	f.serve("demo", hello("old"))
	c := f.client()
	f.get(c, "https://demo.helix.local/")
	fresh := httptest.NewServer(hello("new"))
	defer fresh.Close()
	f.set(func() {
		f.routes["demo"] = Route{Workspace: "demo", Port: 80, Pool: "gpu-2"}
		f.addrs["demo:80"] = fresh.Listener.Addr().String()
	})
	if _, body := f.get(c, "https://demo.helix.local/"); !strings.HasPrefix(body, "new") {
		t.Errorf("got %q", body)
	}
	before := f.count
	f.get(c, "https://demo.helix.local/")
	if f.count != before {
		t.Error("a kept connection was not used again")
	}
}

// A download that breaks off must not look complete.
func TestBrokenDownloadIsAnError(t *testing.T) {
	f := newFixture(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			_, _ = http.ReadRequest(bufio.NewReader(c))
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
			_ = c.(*net.TCPConn).SetLinger(0)
			_ = c.Close()
		}
	}()
	f.add("demo", 80, ProtocolHTTP, ln.Addr().String())
	for _, version := range []string{"--http1.1", "--http2"} {
		_, err := f.curl(version, "https://demo.helix.local/")
		exit, ok := errors.AsType[*exec.ExitError](err)
		if !ok || exit.ExitCode() != 18 && exit.ExitCode() != 56 && exit.ExitCode() != 92 {
			t.Errorf("%s: got %v, want a broken transfer", version, err)
		}
	}
}

func TestLargeBodiesPassUnchanged(t *testing.T) {
	f := newFixture(t)
	f.serve("demo", func(w http.ResponseWriter, r *http.Request) { _, _ = io.Copy(w, r.Body) })
	data := make([]byte, 32<<20)
	_, _ = rand.Read(data)
	want := sha256.Sum256(data)
	resp, err := f.client().Post("https://demo.helix.local/", "application/octet-stream", bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	sum := sha256.New()
	if n, err := io.Copy(sum, resp.Body); err != nil || !bytes.Equal(sum.Sum(nil), want[:]) {
		t.Fatalf("%d bytes, %v", n, err)
	}
}

// gRPC clients without TLS speak HTTP/2 from the first byte.
func TestPlainHTTP2(t *testing.T) {
	f := newFixture(t)
	f.serve("demo", hello("x"))
	out, err := f.curl("--connect-to", "::"+f.http, "--http2-prior-knowledge", "-w", " %{http_version}", "http://demo.helix.local/")
	if err != nil || out != "x demo.helix.local / 2" {
		t.Errorf("got %q, %v", out, err)
	}
}

// The reason must reach a client that is still sending.
func TestReasonReachesAnUpload(t *testing.T) {
	f := newFixture(t)
	f.serve("demo", hello("x"))
	for _, scheme := range []string{"http", "https"} {
		r := io.LimitReader(rand.Reader, 16<<20)
		resp, err := f.client().Post(scheme+"://99.demo.helix.local/", "application/octet-stream", r)
		if err != nil {
			t.Fatal(scheme, err)
		}
		body, err := io.ReadAll(resp.Body)
		if err != nil || resp.Header.Get("X-Helix-Reason") != string(ReasonRefused) {
			t.Errorf("%s: got %s %q, %v", scheme, resp.Status, body, err)
		}
		_ = resp.Body.Close()
	}
}
