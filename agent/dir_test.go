//go:build linux

package agent

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"helix.local/helix/agent/wire"
	"helix.local/helix/tunnel"
)

func sockets() ([2]int, error) {
	return unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
}

// call asks the agent's API over a stream of its own.
func (a *dirAgent) call(t *testing.T, method, path string, body any) (status int, answer string) {
	t.Helper()
	var r io.Reader = strings.NewReader("")
	switch b := body.(type) {
	case nil:
	case io.Reader:
		r = b
	default:
		text, err := json.Marshal(b)
		if err != nil {
			t.Fatal(err)
		}
		r = strings.NewReader(string(text))
	}
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return a.Open(ctx, wire.OpenRequest{Service: wire.ServiceAPI})
	}}
	req, err := http.NewRequestWithContext(t.Context(), method, "http://agent"+path, r)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(text)
}

func TestDir(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	g := newGateway(t)
	a := startDir(t, g.boot("demo", dir, "127.88.200.1"), g)

	var health wire.Health
	_, text := a.call(t, "GET", wire.PathHealth, nil)
	if err := json.Unmarshal([]byte(text), &health); err != nil || health.OK || health.Generation != 7 || health.Version != "test" {
		t.Errorf("health before the identity: %s", text)
	}
	if _, err := a.Open(t.Context(), wire.OpenRequest{Service: wire.ServiceSSH}); err == nil || !strings.Contains(err.Error(), "identity not set") {
		t.Errorf("ssh before the identity: %v", err)
	}
	a.identify(t)
	if _, text := a.call(t, "GET", wire.PathHealth, nil); !strings.Contains(text, `{"ok":true`) {
		t.Errorf("health: %s", text)
	}
	if got := a.run(t, "pwd; echo $HELIX_WORKSPACE $HELIX_ADDR"); got != dir+"\ndemo 127.88.200.1\n" {
		t.Errorf("got %q", got)
	}
	if status, text := a.call(t, "PUT", wire.PathClock, wire.Clock{Time: time.Now()}); status != http.StatusForbidden {
		t.Errorf("clock: %d %s", status, text)
	}
	var stats wire.Stats
	_, text = a.call(t, "GET", wire.PathStats, nil)
	if err := json.Unmarshal([]byte(text), &stats); err != nil || stats.MemoryTotal == 0 || stats.DiskTotal == 0 || stats.Processes == 0 || stats.Descriptors == 0 {
		t.Errorf("stats: %s, %v", text, err)
	}
	for request, want := range map[wire.OpenRequest]error{
		{Service: "nothing"}: tunnel.ErrNoService, {Port: 1}: tunnel.ErrRefused, {Unix: dir + "/none"}: tunnel.ErrRefused,
	} {
		if _, err := a.Open(t.Context(), request); !errors.Is(err, want) {
			t.Errorf("%+v: got %v, want %v", request, err, want)
		}
	}
	ln, err := net.Listen("unix", filepath.Join(dir, "socket"))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close() //nolint:errcheck // the test's own
	st, err := a.Open(t.Context(), wire.OpenRequest{Unix: filepath.Join(dir, "socket")})
	if err != nil {
		t.Fatal(err)
	}
	_ = st.Close() // nothing was exchanged
}

// Two folders side by side listen on one port; each way in reaches its own.
func TestTwoDirs(t *testing.T) {
	t.Parallel()
	port := 0
	agents := map[string]*dirAgent{}
	for i, name := range []string{"one", "two"} {
		g := newGateway(t)
		a := startDir(t, g.boot(name, t.TempDir(), fmt.Sprintf("127.88.201.%d", i+1)), g)
		agents[name] = a
		a.identify(t)
		s, err := a.ssh(t).NewSession()
		if err != nil {
			t.Fatal(err)
		}
		s.Stdin = strings.NewReader(fmt.Sprintln(port))
		out, err := s.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Start(os.Args[0] + " listen"); err != nil {
			t.Fatal(err)
		}
		if _, err := fmt.Fscan(bufio.NewReader(out), &port); err != nil {
			t.Fatal(err)
		}
	}
	for name, a := range agents {
		st, err := a.Open(t.Context(), wire.OpenRequest{Port: uint16(port)})
		if err != nil {
			t.Fatal(err)
		}
		ask(t, st, name+" got 5")
		forwarded, err := a.ssh(t).Dial("tcp", fmt.Sprintf("localhost:%d", port))
		if err != nil {
			t.Fatal(err)
		}
		ask(t, forwarded.(tunnel.Conn), name+" got 5")
		_, text := a.call(t, "GET", wire.PathPorts, nil)
		var list []wire.Port
		if err := json.Unmarshal([]byte(text), &list); err != nil || len(list) != 1 || int(list[0].Port) != port || !strings.HasPrefix(list[0].Address, "127.88.201.") {
			t.Errorf("%s: ports %s, %v", name, text, err)
		}
	}
}

// ask sends five bytes, half-closes, and wants the answer.
func ask(t *testing.T, c tunnel.Conn, want string) {
	t.Helper()
	defer c.Close() //nolint:errcheck // read to its end
	if _, err := c.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(c); err != nil || string(got) != want {
		t.Errorf("got %q, %v; want %q", got, err, want)
	}
}

// A watcher sees a port come and go within two seconds.
func TestPortWatch(t *testing.T) {
	t.Parallel()
	g := newGateway(t)
	a := startDir(t, g.boot("demo", t.TempDir(), ""), g)
	a.identify(t)
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return a.Open(ctx, wire.OpenRequest{Service: wire.ServiceAPI})
	}}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, "GET", "http://agent"+wire.PathPorts+"?watch=1", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close() //nolint:errcheck // cut by the test
	lines := json.NewDecoder(resp.Body)
	next := func() (list []wire.Port) {
		if err := lines.Decode(&list); err != nil {
			t.Fatal(err)
		}
		return list
	}
	if first := next(); len(first) != 0 {
		t.Fatalf("ports before any program: %+v", first)
	}
	s, err := a.ssh(t).NewSession()
	if err != nil {
		t.Fatal(err)
	}
	s.Stdin = strings.NewReader("0\n")
	if err := s.Start("exec " + os.Args[0] + " listen"); err != nil {
		t.Fatal(err)
	}
	if list := next(); len(list) != 1 {
		t.Fatalf("got %+v", list)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if list := next(); len(list) != 0 {
		t.Fatalf("got %+v", list)
	}
}

// When the link ends, everything that was started ends too: ordinary children,
// daemons that left their session, and what ignores SIGTERM.
func TestEndOfLink(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*testing.T, *dirAgent){
		"link":     func(_ *testing.T, a *dirAgent) { _ = a.Close() },
		"shutdown": func(t *testing.T, a *dirAgent) { a.call(t, "POST", wire.PathShutdown, nil) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := newGateway(t)
			a := startDir(t, g.boot("demo", t.TempDir(), ""), g)
			a.identify(t)
			pids := strings.Fields(a.run(t, `sleep 1000 >/dev/null 2>&1 & echo $!
(setsid sleep 1001 >/dev/null 2>&1 & echo $!)
(trap "" TERM HUP; setsid sh -c 'while :; do sleep 0.05; done' >/dev/null 2>&1 & echo $!)`))
			if len(pids) != 3 {
				t.Fatalf("pids %q", pids)
			}
			began := time.Now()
			end(t, a)
			if err := a.cmd.Wait(); err != nil {
				t.Errorf("agent: %v", err)
			}
			if took := time.Since(began); took > 5*time.Second {
				t.Errorf("took %v", took)
			}
			left := slices.DeleteFunc(pids, func(pid string) bool {
				_, err := os.Stat("/proc/" + pid)
				return errors.Is(err, os.ErrNotExist)
			})
			if len(left) > 0 {
				t.Errorf("still there: %v", left)
			}
		})
	}
}

func TestFiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "sub"), 0o750); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Symlink("/etc/passwd", filepath.Join(dir, "out")), syscall.Mkfifo(filepath.Join(dir, "pipe"), 0o600)); err != nil {
		t.Fatal(err)
	}
	g := newGateway(t)
	a := startDir(t, g.boot("demo", dir, ""), g)
	for _, c := range []struct {
		method, query, body string
		status              int
		answer              string
	}{
		{"PUT", "path=sub/f&mode=0751", "content", 204, ""},
		{"GET", "path=sub/f", "", 200, "content"},
		{"GET", "path=" + dir + "/sub/f", "", 200, "content"},
		{"PUT", "path=sub/f", "new", 204, ""},
		{"GET", "path=sub/f", "", 200, "new"},
		{"GET", "path=sub", "", 200, `"name":"f","size":3,"mode":"0644"`},
		{"GET", "path=none", "", 404, "no such file"},
		{"GET", "path=pipe", "", 400, "neither file nor folder"},
		{"GET", "path=../x", "", 403, "outside"},
		{"GET", "path=/etc/passwd", "", 403, "outside"},
		{"GET", "path=out", "", 400, "escapes"},
		{"PUT", "path=out/x", "x", 500, "error"},
		{"PUT", "path=x&mode=99", "x", 400, "octal"},
		{"PUT", "path=none/x", "x", 404, "no such file"},
		{"DELETE", "path=none", "", 404, "no such file"},
		{"DELETE", "path=", "", 403, "workspace folder"},
		{"DELETE", "path=sub", "", 204, ""},
		{"GET", "path=sub/f", "", 404, "no such file"},
		{"GET", "", "", 200, `"name":"out"`},
	} {
		status, answer := a.call(t, c.method, wire.PathFiles+"?"+c.query, strings.NewReader(c.body))
		if status != c.status || !strings.Contains(answer, c.answer) {
			t.Errorf("%s %s: %d %s; want %d %s", c.method, c.query, status, answer, c.status, c.answer)
		}
	}
	if left, err := filepath.Glob(dir + "/.helix*"); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	if status, answer := a.call(t, "PUT", wire.PathIdentity, strings.NewReader(`{"host_key": "SECRET"`)); status != 400 || strings.Contains(answer, "SECRET") {
		t.Errorf("cut identity: %d %s", status, answer)
	}
	if status, answer := a.call(t, "PUT", wire.PathIdentity, wire.Identity{HostKey: "SECRET"}); status != 400 || strings.Contains(answer, "SECRET") {
		t.Errorf("bad identity: %d %s", status, answer)
	}
}
