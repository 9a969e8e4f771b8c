//go:build linux

package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"helix.local/helix/agent/guest"
	"helix.local/helix/agent/process"
	"helix.local/helix/agent/session"
	"helix.local/helix/agent/wire"
	"helix.local/helix/tunnel"
)

// startHere runs a target in this process, over a real session, as the guest
// agent does; what needs a machine of its own is given by change.
func startHere(t *testing.T, dir string, change func(*settings)) *dirAgent {
	t.Helper()
	g := newGateway(t)
	own := session.Account{Name: "tester", Home: dir, Shell: "/bin/sh", Own: true}
	s := settings{
		boot: g.boot("demo", dir, ""), version: "test", log: slog.New(slog.DiscardHandler), program: os.Args[0], owner: own,
		accounts: func(string) (session.Account, error) { return own, nil }, env: os.Environ(), shutdown: func() {},
	}
	if change != nil {
		change(&s)
	}
	tg, err := newTarget(s)
	if err != nil {
		t.Fatal(err)
	}
	k, err := newKeeper(s.boot, "test", tg.handle, s.log)
	if err != nil {
		t.Fatal(err)
	}
	l := make(links)
	ctx, cancel := context.WithCancel(context.Background())
	var work sync.WaitGroup
	work.Go(func() { k.keep(ctx, wire.LinkTCP, l.dial) })
	work.Go(func() {
		if err := tg.serveAPI(ctx); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		cancel()
		work.Wait()
		if err := tg.ssh.Close(time.Second); err != nil {
			t.Error(err)
		}
	})
	sess, err := accept(t, g, l)
	if err != nil {
		t.Fatal(err)
	}
	return &dirAgent{Session: sess}
}

func TestTarget(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	var clock, down sync.WaitGroup
	clock.Add(1)
	down.Add(1)
	broken := errors.New("on fire")
	a := startHere(t, dir, func(s *settings) {
		s.setClock = func(now time.Time) error {
			if now.IsZero() {
				return broken
			}
			clock.Done()
			return nil
		}
		s.shutdown = func() { down.Done() }
		s.checks = []check{{wire.CheckRoot, func() error { return broken }}, {wire.CheckWorkspace, func() error { return writable(dir) }}}
	})
	a.identify(t)
	if got := a.run(t, "pwd"); got != dir+"\n" {
		t.Errorf("got %q", got)
	}
	if _, text := a.call(t, "GET", wire.PathHealth, nil); !strings.Contains(text, `{"ok":false,"checks":[{"name":"root","ok":false,"error":"on fire"},{"name":"workspace","ok":true},{"name":"ssh","ok":true}]`) {
		t.Errorf("health: %s", text)
	}
	if status, _ := a.call(t, "PUT", wire.PathClock, wire.Clock{Time: time.Now()}); status != 204 {
		t.Errorf("clock: %d", status)
	}
	if status, text := a.call(t, "PUT", wire.PathClock, wire.Clock{}); status != 500 || !strings.Contains(text, "on fire") {
		t.Errorf("clock that cannot be set: %d %s", status, text)
	}
	if status, _ := a.call(t, "POST", wire.PathShutdown, nil); status != 204 {
		t.Errorf("shutdown: %d", status)
	}
	if status, _ := a.call(t, "POST", wire.PathClock, nil); status != 405 {
		t.Errorf("wrong method: %d", status)
	}
	clock.Wait()
	down.Wait()
	if _, text := a.call(t, "GET", wire.PathStats, nil); !strings.Contains(text, `"memory_total"`) {
		t.Errorf("stats: %s", text)
	}

	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close() //nolint:errcheck // the test's own
	port := ln.Addr().(*net.TCPAddr).Port
	if _, text := a.call(t, "GET", wire.PathPorts, nil); !strings.Contains(text, `"port":`) {
		t.Errorf("ports: %s", text)
	}
	// A reset of the stream arrives as a reset at the service.
	st, err := a.Open(t.Context(), wire.OpenRequest{Port: uint16(port)})
	if err != nil {
		t.Fatal(err)
	}
	upstream, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	if err := st.Reset("test"); err != nil {
		t.Fatal(err)
	}
	if _, err := upstream.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("upstream: %v", err)
	}
	_ = upstream.Close() // reset
	if _, err := a.Open(t.Context(), wire.OpenRequest{Service: "none"}); !errors.Is(err, tunnel.ErrNoService) {
		t.Errorf("unknown service: %v", err)
	}
}

func TestFilesHere(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	a := startHere(t, dir, nil)
	for _, c := range []struct {
		method, query string
		status        int
	}{
		{"PUT", "path=f", 204},
		{"GET", "path=f", 200},
		{"GET", "path=", 200},
		{"GET", "path=..", 403},
		{"PUT", "path=f&mode=x", 400},
		{"PUT", "path=../f", 403},
		{"DELETE", "path=f", 204},
		{"DELETE", "path=f", 404},
	} {
		if status, text := a.call(t, c.method, wire.PathFiles+"?"+c.query, strings.NewReader("x")); status != c.status {
			t.Errorf("%s %s: %d %s, want %d", c.method, c.query, status, text, c.status)
		}
	}
}

func TestLoopbackNames(t *testing.T) {
	t.Parallel()
	for host, want := range map[string]bool{"localhost": true, "127.0.0.1": true, "::1": true, "127.0.0.2": false, "example.org": false, "": false} {
		if got := loopback(host); got != want {
			t.Errorf("loopback(%q) = %v", host, got)
		}
	}
}

// The parts of the guest's agent that need no machine.
func TestMachine(t *testing.T) {
	t.Parallel()
	var console bytes.Buffer
	m := &machine{began: time.Now(), console: &console, log: slog.New(slog.DiscardHandler), modules: make(chan struct{}), down: make(chan int, 1)}
	m.report("mounts", nil)
	m.report("network", errors.Join(errors.New("a"), errors.New("b")))
	if got := console.String(); got != "helix-agent: mounts ok (0s)\nhelix-agent: network: a; b (0s)\n" {
		t.Errorf("console: %q", got)
	}

	checks := map[string]func() error{}
	for _, c := range m.checks(wire.Boot{}) {
		checks[c.name] = c.run
	}
	for _, name := range []string{wire.CheckNetwork, wire.CheckWorkspace} {
		if err := checks[name](); !errors.Is(err, errPending) {
			t.Errorf("%s at first: %v", name, err)
		}
	}
	m.network = stage{true, guest.ErrNoNetwork}
	if err := checks[wire.CheckNetwork](); err != nil {
		t.Errorf("no network where none was planned: %v", err)
	}
	for _, c := range m.checks(wire.Boot{Link: "10.188.0.1:4580"}) {
		if c.name == wire.CheckNetwork {
			if err := c.run(); !errors.Is(err, guest.ErrNoNetwork) {
				t.Errorf("no network where one was planned: %v", err)
			}
		}
	}
	m.goDown(guest.PowerOff)
	m.goDown(guest.Restart)
	if how := <-m.down; how != guest.PowerOff {
		t.Errorf("went down by %#x", how)
	}
	m.must(t.Context(), "part", func(context.Context) error { return errors.New("broken") })
	if !strings.Contains(console.String(), "part: broken") {
		t.Errorf("console: %q", console.String())
	}
}

func TestMachineWithoutBoot(t *testing.T) {
	t.Parallel()
	m := &machine{modules: make(chan struct{})}
	close(m.modules)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := m.readBoot(ctx, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	m.driver(ctx, "/no/such/device")
}

func TestGuestAccounts(t *testing.T) {
	t.Parallel()
	root, err := guestAccount("root")
	if err != nil || root.UID != 0 || root.Home != "/root" {
		t.Errorf("root: %+v, %v", root, err)
	}
	for _, login := range []string{"helix", "whoever", ""} {
		if a, err := guestAccount(login); err != nil || a.Name != guestUser {
			t.Errorf("%q: %+v, %v", login, a, err)
		}
	}
}

// A guest's settings make a target whose answer to a login is a guest account.
func TestGuestTarget(t *testing.T) {
	t.Parallel()
	var console bytes.Buffer
	m := &machine{began: time.Now(), version: "test", console: &console, log: slog.New(slog.DiscardHandler), down: make(chan int, 1)}
	tg, err := m.target(newGateway(t).boot("demo", "", ""), process.NewReaper())
	if err != nil {
		t.Fatal(err)
	}
	if tg.boot.Dir != guestWorkspace || tg.owner.Name != guestUser || len(tg.checks) != 4 {
		t.Errorf("got %+v", tg)
	}
	if err := tg.setClock(time.Now()); err != nil {
		t.Error(err)
	}
	tg.shutdown()
	if how := <-m.down; how != guest.PowerOff {
		t.Errorf("went down by %#x", how)
	}
}

// What RunDir refuses, before it changes anything.
func TestRunDirRefuses(t *testing.T) {
	t.Parallel()
	g := newGateway(t)
	for name, c := range map[string]struct{ boot, want string }{
		"nothing":   {"", "malformed JSON"},
		"no folder": {marshal(t, g.boot("demo", "", "")), "dir: missing"},
		"endless":   {strings.Repeat("x", wire.MaxFrame+1), "read boot parameters"},
	} {
		conn, link := socketPair(t)
		err := RunDir(t.Context(), DirConfig{Boot: strings.NewReader(c.boot), Link: link})
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
		_ = conn.Close() // the agent is gone
	}
}

func marshal(t *testing.T, v any) string {
	t.Helper()
	text, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestOwnAccount(t *testing.T) {
	t.Parallel()
	a, err := ownAccount("/w")
	if err != nil || !a.Own || int(a.UID) != os.Geteuid() || a.Shell == "" {
		t.Errorf("got %+v, %v", a, err)
	}
}

func TestInherited(t *testing.T) {
	t.Parallel()
	got := inherited([]string{"PATH=/bin", "TERM=x", "SSH_AUTH_SOCK=/x", "NOTIFY_SOCKET=/x", "HELIX_STATE=/x", "HOME=/h", "LISTEN_FDS=1"})
	if strings.Join(got, " ") != "PATH=/bin HOME=/h" {
		t.Errorf("got %q", got)
	}
}
