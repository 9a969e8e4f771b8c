package web

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// Each way of not being served, told apart by status and header, in each form.
func TestErrorPages(t *testing.T) {
	f := newFixture(t)
	f.serve("demo", hello("x"))
	notHTTP, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = notHTTP.Close() }()
	go func() {
		for {
			c, err := notHTTP.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, "SSH-2.0-OpenSSH\r\n")
			_ = c.Close()
		}
	}()
	f.add("demo", 22, ProtocolHTTP, notHTTP.Addr().String())
	f.set(func() {
		f.fails["stopped"] = &RouteError{Reason: ReasonStopped, Workspace: "stopped"}
		f.fails["starting"] = fmt.Errorf("wrapped: %w", &RouteError{Reason: ReasonStarting, Workspace: "starting", Stage: "boot kernel", RetryAfter: 2500 * time.Millisecond})
		f.fails["failed"] = &RouteError{Reason: ReasonFailed, Workspace: "failed", Stage: "boot kernel", Message: "no <console> line in 60 s"}
		f.fails["odd"] = errors.New("registry on fire")
		f.fails["noweb"] = &RouteError{Reason: ReasonRefused, Workspace: "noweb", Ports: []uint16{5432}}
		f.dials["demo:81"] = &RouteError{Reason: ReasonTunnelDown, Workspace: "demo", Port: 81, Err: errors.New("session closed")}
		f.dials["demo:82"] = context.DeadlineExceeded
		f.dials["demo:83"] = errors.New("session closed")
		f.dials["demo:84"] = &net.OpError{Op: "dial", Err: timeoutError{}}
	})
	for host, c := range map[string]struct {
		status int
		reason Reason
		text   []string // all must be in each form
		header map[string]string
	}{
		"demo.example.com":            {404, ReasonUnknownHost, []string{"does not belong"}, nil},
		"nosuch.helix.local":          {404, ReasonUnknownWorkspace, []string{"nosuch", "demo.helix.local"}, nil},
		"mail.demo.helix.local":       {404, ReasonUnknownService, []string{"mail"}, nil},
		"stopped.helix.local":         {503, ReasonStopped, []string{"is stopped", "helix start stopped"}, nil},
		"starting.helix.local":        {503, ReasonStarting, []string{"is starting", "boot kernel"}, map[string]string{"Retry-After": "3"}},
		"failed.helix.local":          {502, ReasonFailed, []string{"boot kernel", "console", "helix logs failed"}, nil},
		"99.demo.helix.local":         {502, ReasonRefused, []string{"port 99", "5173.demo.helix.local"}, nil},
		"noweb.helix.local":           {502, ReasonRefused, []string{"No web service", "5432.noweb.helix.local"}, nil},
		"81.demo.helix.local":         {502, ReasonTunnelDown, []string{"is down"}, nil},
		"82.demo.helix.local":         {504, ReasonTimeout, []string{"in time"}, nil},
		"83.demo.helix.local":         {502, ReasonTunnelDown, []string{"is down"}, nil},
		"84.demo.helix.local":         {502, ReasonTunnelDown, []string{"is down"}, nil},
		"22.demo.helix.local":         {502, ReasonBadAnswer, []string{"port 22", "no complete answer"}, nil},
		"odd.helix.local":             {502, ReasonTunnelDown, []string{"odd"}, nil},
		"nosuch.helix.internal:10080": {404, ReasonUnknownWorkspace, []string{"http://demo.helix.local:10080/"}, nil},
	} {
		t.Run(host, func(t *testing.T) {
			for _, accept := range []string{"text/html,application/xhtml+xml", "application/json", "*/*", "text/event-stream"} {
				resp, body := f.get(f.client(func(tr *http.Transport) {
					tr.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
						var d net.Dialer
						return d.DialContext(ctx, "tcp", f.http)
					}
				}), "http://"+host+"/", "Accept", accept)
				if resp.StatusCode != c.status || resp.Header.Get("X-Helix-Reason") != string(c.reason) {
					t.Fatalf("got %s, %q", resp.Status, resp.Header.Get("X-Helix-Reason"))
				}
				for key, want := range c.header {
					if got := resp.Header.Get(key); got != want {
						t.Errorf("%s: got %q, want %q", key, got, want)
					}
				}
				kind := resp.Header.Get("Content-Type")
				switch {
				case strings.Contains(accept, "html"):
					checkHTML(t, c.reason, kind, body)
				case accept == "application/json":
					var p page
					if err := json.Unmarshal([]byte(body), &p); err != nil || p.Reason != c.reason || p.Status != c.status || kind != accept {
						t.Errorf("%s: %v: %s", kind, err, body)
					}
					body = strings.ReplaceAll(body, `\"`, `"`)
				default:
					if kind != "text/plain; charset=utf-8" {
						t.Errorf("got %s", kind)
					}
				}
				for _, want := range c.text {
					if !strings.Contains(body, want) {
						t.Errorf("%q is not in %s: %s", want, accept, body)
					}
				}
				if strings.Contains(body, "on fire") || resp.Header.Get("Server") != "" {
					t.Errorf("shows its inside: %s %v", body, resp.Header)
				}
			}
		})
	}
}

func checkHTML(t *testing.T, reason Reason, kind, body string) {
	t.Helper()
	if !strings.HasPrefix(kind, "text/html") || strings.Contains(body, "<console>") {
		t.Errorf("%s: %s", kind, body)
	}
	if strings.Contains(body, "http-equiv=\"refresh\"") != (reason == ReasonStarting) {
		t.Errorf("only the page of a start loads itself again: %s", body)
	}
}

type timeoutError struct{}

func (timeoutError) Error() string   { return "i/o timeout" }
func (timeoutError) Timeout() bool   { return true }
func (timeoutError) Temporary() bool { return false }

func TestDialTakesItsTime(t *testing.T) {
	var ended atomic.Bool
	f := newFixture(t, func(c *Config) {
		c.DialTimeout = 20 * time.Millisecond
		c.Dial = func(ctx context.Context, _ string, _ uint16) (net.Conn, error) {
			<-ctx.Done()
			ended.Store(true)
			return nil, ctx.Err()
		}
	})
	f.add("demo", 80, ProtocolHTTP, "")
	resp, _ := f.get(f.client(), "https://demo.helix.local/")
	if resp.Header.Get("X-Helix-Reason") != string(ReasonTimeout) || !ended.Load() {
		t.Errorf("got %s %s", resp.Status, resp.Header.Get("X-Helix-Reason"))
	}
}

func TestPagesOverTLSAndHead(t *testing.T) {
	f := newFixture(t)
	out, err := f.curl("-i", "https://nosuch.helix.local/", "-H", "Accept: text/html")
	if err != nil || !strings.Contains(out, "x-helix-reason: unknown-workspace") || !strings.Contains(out, `href="https://demo.helix.local/"`) {
		t.Errorf("got %q, %v", out, err)
	}
	out, err = f.curl("--http1.1", "-I", "https://nosuch.helix.local/")
	if err != nil || !strings.Contains(out, "X-Helix-Reason: unknown-workspace") {
		t.Errorf("got %q, %v", out, err)
	}
}

func TestGatewayHandlerMayBeMissing(t *testing.T) {
	f := newFixture(t, func(c *Config) { c.Gateway = nil })
	if resp, _ := f.get(f.client(), "https://gw.helix.local/"); resp.Header.Get("X-Helix-Reason") != string(ReasonUnknownHost) {
		t.Errorf("got %s", resp.Status)
	}
}

// A service that takes the request and then nothing: no limit is ours to set,
// but a deadline of the transport below is told as one.
func TestProxyErrorReasons(t *testing.T) {
	route := Route{Workspace: "demo", Port: 80}
	for name, c := range map[string]struct {
		err  error
		want Reason
	}{
		"timeout":    {&net.OpError{Op: "read", Err: timeoutError{}}, ReasonTimeout},
		"deadline":   {fmt.Errorf("x: %w", context.DeadlineExceeded), ReasonTimeout},
		"reset":      {io.ErrUnexpectedEOF, ReasonBadAnswer},
		"known":      {fmt.Errorf("x: %w", &RouteError{Reason: ReasonRefused}), ReasonRefused},
		"unassigned": {errors.New("x"), ReasonBadAnswer},
	} {
		if got := proxyError(c.err, route); got.Reason != c.want {
			t.Errorf("%s: got %s, want %s", name, got.Reason, c.want)
		}
	}
	e := &RouteError{Reason: ReasonRefused, Workspace: "demo", Port: 80, Message: "it left", Err: io.EOF}
	if got, want := e.Error(), `route to "demo" port 80: refused: it left: EOF`; got != want || !errors.Is(e, io.EOF) {
		t.Errorf("got %q, want %q", got, want)
	}
	if Reason("new").Status() != http.StatusBadGateway {
		t.Error("an unknown reason has no status")
	}
	if title, _ := words("new", "demo", Name{}, 0); title == "" {
		t.Error("an unknown reason has no words")
	}
	if _, err := newPools(&Server{}).RoundTrip(httptest.NewRequest(http.MethodGet, "/", nil)); err == nil {
		t.Error("a request without route was sent")
	}
}
