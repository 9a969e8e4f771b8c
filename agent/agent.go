// Package agent is the program that runs in a target: it keeps a tunnel session
// to the gateway and serves SSH, an HTTP API, the target's ports and its unix
// sockets over it.
//
// [RunGuest] is the agent as the first process of a virtual machine, [RunDir]
// that of a folder on the gateway's own machine. Both are told by a wire.Boot
// where they belong, make a key of their own that never leaves memory, and
// exchange the one-time token for the right to use that key.
package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"runtime/debug"
	"syscall"
	"time"

	"helix.local/helix/agent/ports"
	"helix.local/helix/agent/process"
	"helix.local/helix/agent/session"
	"helix.local/helix/agent/wire"
	"helix.local/helix/tunnel"
)

// target is what both kinds of agent serve.
type target struct {
	boot    wire.Boot
	version string
	log     *slog.Logger
	ssh     *session.Server
	ports   *ports.Watch
	api     *apiListener
	checks  []check
	booted  time.Time
	owner   session.Account // whom files made through the API belong to

	// setClock steps the clock; nil where the clock is not ours.
	setClock func(time.Time) error
	// shutdown begins the orderly end; it returns at once.
	shutdown func()
}

// check is one line of the target's health.
type check struct {
	name string
	run  func() error
}

// settings is what distinguishes the kinds of agent.
type settings struct {
	boot     wire.Boot
	version  string
	log      *slog.Logger
	reaper   *process.Reaper
	accounts func(login string) (session.Account, error)
	owner    session.Account
	env      []string
	program  string // of this agent, to run as sftp-server
	watch    ports.Config
	checks   []check
	setClock func(time.Time) error
	shutdown func()
}

func newTarget(s settings) (*target, error) {
	t := &target{
		boot: s.boot, version: s.version, log: s.log, ports: ports.New(s.watch), api: newAPIListener(),
		booted: time.Now(), owner: s.owner, setClock: s.setClock, shutdown: s.shutdown,
	}
	var err error
	t.ssh, err = session.New(session.Config{
		Accounts: s.accounts, Env: s.env, Dir: s.boot.Dir, Reaper: s.reaper,
		SFTPServer: []string{s.program, SFTPCommand}, DialTCP: t.dialFor, Log: s.log,
	})
	if err != nil {
		return nil, fmt.Errorf("prepare the ssh server: %w", err)
	}
	t.checks = append(s.checks, check{wire.CheckSSH, func() error {
		if !t.ssh.Ready() {
			return session.ErrNoIdentity
		}
		return nil
	}})
	return t, nil
}

// serveAPI serves the HTTP API until ctx is done.
func (t *target) serveAPI(ctx context.Context) error {
	server := &http.Server{
		Handler:           t.routes(),
		ReadHeaderTimeout: 30 * time.Second,
		BaseContext:       func(net.Listener) context.Context { return ctx },
		ErrorLog:          slog.NewLogLogger(t.log.Handler(), slog.LevelDebug),
	}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() }) // streams only: they end with their session too
	defer stop()
	if err := server.Serve(t.api); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve api: %w", err)
	}
	return nil
}

// handle dials what the gateway asks for.
func (t *target) handle(ctx context.Context, req wire.OpenRequest) (tunnel.Conn, error) {
	switch {
	case req.Service == wire.ServiceSSH:
		if !t.ssh.Ready() {
			return nil, fmt.Errorf("open ssh: %w", session.ErrNoIdentity)
		}
		return tunnel.Local(func(ctx context.Context, st *tunnel.Stream) {
			defer t.contain()
			if err := t.ssh.ServeConn(ctx, st); err != nil {
				t.log.DebugContext(ctx, "ssh connection ended", "err", err)
			}
		}), nil
	case req.Service == wire.ServiceAPI:
		return tunnel.Local(func(ctx context.Context, st *tunnel.Stream) { t.api.serve(ctx, st) }), nil
	case req.Service != "":
		return nil, fmt.Errorf("open %q: %w", req.Service, tunnel.ErrNoService)
	case req.Port != 0:
		return t.ports.Dial(ctx, req.Port)
	default:
		path := req.Unix
		if !filepath.IsAbs(path) {
			path = filepath.Join(t.boot.Dir, path)
		}
		var dialer net.Dialer
		conn, err := dialer.DialContext(ctx, "unix", path)
		if err != nil {
			return nil, err //nolint:wrapcheck // names the path
		}
		return conn.(*net.UnixConn), nil //nolint:forcetypeassert // the network is "unix"
	}
}

// contain keeps a panic of one connection from ending the agent, and in a guest
// the machine with it.
func (t *target) contain() {
	if r := recover(); r != nil {
		t.log.Error("connection panicked", "err", r, "stack", string(debug.Stack()))
	}
}

// dialFor connects ssh -L and -W. A loopback name means this target: its own
// programs come first, wherever they are bound.
func (t *target) dialFor(ctx context.Context, host string, port uint16) (net.Conn, error) {
	if loopback(host) {
		conn, err := t.ports.Dial(ctx, port)
		if err == nil {
			return conn, nil
		}
		if !errors.Is(err, syscall.ECONNREFUSED) {
			t.log.DebugContext(ctx, "own port not dialled", "err", err)
		}
	}
	dialer := net.Dialer{Timeout: 30 * time.Second}
	return dialer.DialContext(ctx, "tcp", net.JoinHostPort(host, fmt.Sprint(port))) //nolint:wrapcheck // names the address
}

func loopback(host string) bool {
	if host == "localhost" {
		return true
	}
	addr, err := netip.ParseAddr(host)
	return err == nil && (addr == netip.IPv6Loopback() || addr == netip.AddrFrom4([4]byte{127, 0, 0, 1}))
}
