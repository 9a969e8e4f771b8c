//go:build unix

package sshd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/crypto/ssh"
)

// TestMain lets the test program be the "helix proxy" that ssh starts.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "proxy" {
		if err := proxyHelper(os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, "helper:", err)
			os.Exit(1)
		}
		return
	}
	goleak.VerifyTestMain(m)
}

// proxyHelper connects to the test's own gateway, says which host and port are
// wanted, and hands the connection over on standard output.
func proxyHelper(args []string) error {
	if len(args) != 5 || args[0] != "--state" || args[2] != "--pass-fd" {
		return fmt.Errorf("arguments %q", args)
	}
	addr, err := os.ReadFile(filepath.Join(args[1], "addr"))
	if err != nil {
		return err
	}
	conn, err := net.Dial("tcp", string(addr))
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintf(conn, "%s %s\n", args[3], args[4]); err != nil {
		return err
	}
	file, err := conn.(*net.TCPConn).File()
	if err != nil {
		return err
	}
	out, err := net.FileConn(os.Stdout)
	if err != nil {
		return err
	}
	_, _, err = out.(*net.UnixConn).WriteMsgUnix([]byte{0}, syscall.UnixRights(int(file.Fd())), nil)
	return err
}

// installation is a whole one: keys, a jump host, and workspaces.
type installation struct {
	keys   *Keys
	auth   *Authorized
	server *Server
	state  string
	config string // path of the ssh configuration
	ln     net.Listener
	ports  map[string]func(Conn) // services by "name:port"
	lies   map[string]string     // a workspace that another one answers for
	down   map[string]string     // workspaces that cannot be reached, and why
	ended  chan error            // outcome of each Relay
	cancel context.CancelFunc
	start  func()
	done   sync.WaitGroup
}

func newInstallation(t *testing.T, state string) *installation {
	t.Helper()
	if err := os.MkdirAll(state, 0o700); err != nil {
		t.Fatal(err)
	}
	keys, err := OpenKeys(KeysConfig{Dir: filepath.Join(state, "ssh")})
	if err != nil {
		t.Fatal(err)
	}
	in := &installation{
		keys: keys, auth: NewAuthorized(filepath.Join(state, "ssh", "authorized_keys")), state: state,
		config: filepath.Join(state, "ssh", "config"), ports: map[string]func(Conn){}, lies: map[string]string{},
		down: map[string]string{}, ended: make(chan error, 100),
	}
	in.server, err = NewServer(ServerConfig{
		Host:    in.host,
		Client:  keys.ClientConfig,
		Allowed: func(key ssh.PublicKey) bool { return keys.IsClient(key) || in.auth.Allowed(key) },
		Dial:    in.dial,
		Relay: func(ctx context.Context, a, b Conn) error {
			err := relay(ctx, a, b)
			in.ended <- err
			return err
		},
		Linger: 200 * time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	if in.ln, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(state, "addr"), []byte(in.ln.Addr().String()), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	in.cancel = cancel
	in.start = sync.OnceFunc(func() { in.done.Go(func() { in.accept(ctx) }) })
	t.Cleanup(in.stop)
	return in
}

// alphaAddr is the address of workspace alpha.
const alphaAddr = "127.88.0.9"

// host is the identity of a name with its address.
func (in *installation) host(name string) (Host, error) {
	if name == "alpha" {
		return in.keys.Host(name, netip.MustParseAddr(alphaAddr))
	}
	return in.keys.Host(name)
}

func (in *installation) stop() {
	in.cancel()
	_ = in.ln.Close()
	in.done.Wait()
}

// write makes the files that ssh reads, for the named workspaces, and starts
// to serve.
func (in *installation) write(t *testing.T, helix string, names ...string) {
	t.Helper()
	var hosts []Host
	for _, name := range append(names, GatewayName) {
		h, err := in.host(name)
		if err != nil {
			t.Fatal(err)
		}
		hosts = append(hosts, h)
	}
	known := filepath.Join(in.state, "ssh", "known_hosts")
	text, err := ClientConfig{
		Helix: helix, State: in.state, KnownHosts: known, Identity: in.keys.ClientPath(), Hosts: hosts,
	}.Text()
	if err != nil {
		t.Fatal(err)
	}
	for path, text := range map[string][]byte{known: KnownHosts(in.keys.CA(), nil, hosts), in.config: text} {
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	in.start()
}

// accept takes what proxyHelper brings.
func (in *installation) accept(ctx context.Context) {
	for {
		conn, err := in.ln.Accept()
		if err != nil {
			return
		}
		in.done.Go(func() {
			defer conn.Close()
			stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
			defer stop()
			var line []byte
			for b := make([]byte, 1); ; line = append(line, b[0]) {
				if _, err := conn.Read(b); err != nil {
					return
				}
				if b[0] == '\n' {
					break
				}
			}
			host, _, _ := strings.Cut(string(line), " ")
			name, _ := workspaceOf(host, defaultZones(nil))
			if name == alphaAddr {
				name = "alpha"
			}
			if name == GatewayName {
				_ = in.server.ServeConn(ctx, conn)
				return
			}
			in.workspace(ctx, conn, name)
		})
	}
}

// workspace is what routing a connection to port 22 of a workspace comes to.
func (in *installation) workspace(ctx context.Context, conn net.Conn, name string) {
	if other := in.lies[name]; other != "" {
		name = other
	}
	if reason := in.down[name]; reason != "" {
		_ = in.server.ServeUnavailable(ctx, conn, name, reason)
		return
	}
	host, err := in.host(name)
	if err != nil {
		return
	}
	agent(ctx, conn, host, in.keys.IsClient)
}

func (in *installation) dial(ctx context.Context, name string, port uint16) (Conn, error) {
	if name == alphaAddr {
		name = "alpha"
	}
	key := fmt.Sprintf("%s:%d", name, port)
	serve := in.ports[key]
	if port == 22 && (name == "alpha" || name == "beta") {
		serve = func(c Conn) { in.workspace(ctx, c, name) }
	}
	if name == "secret" {
		return nil, fmt.Errorf("reach %s: %w", key, ErrProhibited)
	}
	if serve == nil {
		return nil, &keyError{what: "no workspace " + name, err: errors.New("not found"), hint: `did you mean "alpha"?`}
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	defer ln.Close()
	near, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		return nil, err
	}
	far, err := ln.Accept()
	if err != nil {
		return nil, err
	}
	in.done.Go(func() { serve(far.(*net.TCPConn)) })
	return near.(*net.TCPConn), nil
}

// relay is a plain one with the contract that ServerConfig asks for.
func relay(ctx context.Context, a, b Conn) error {
	stop := context.AfterFunc(ctx, func() { _, _ = a.Close(), b.Close() })
	defer stop()
	var ways sync.WaitGroup
	errs := make([]error, 2)
	way := func(err *error, to, from Conn) {
		if _, *err = io.Copy(struct{ io.Writer }{to}, struct{ io.Reader }{from}); *err == nil {
			*err = to.CloseWrite()
			return
		}
		for _, c := range []Conn{a, b} {
			if tcp, ok := c.(*net.TCPConn); ok {
				_ = tcp.SetLinger(0)
			}
			_ = c.Close()
		}
	}
	ways.Go(func() { way(&errs[0], a, b) })
	ways.Go(func() { way(&errs[1], b, a) })
	ways.Wait()
	return errors.Join(errs[0], errs[1], b.Close())
}

// agent is a small SSH server that runs commands.
func agent(ctx context.Context, conn net.Conn, host Host, allowed func(ssh.PublicKey) bool) {
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	cfg := &ssh.ServerConfig{PublicKeyCallback: func(_ ssh.ConnMetadata, key ssh.PublicKey) (*ssh.Permissions, error) {
		if !allowed(key) {
			return nil, errors.New("no")
		}
		return nil, nil
	}}
	cfg.AddHostKey(host.Cert)
	cfg.AddHostKey(host.Signer)
	client, chans, reqs, err := ssh.NewServerConn(conn, cfg)
	if err != nil {
		return
	}
	defer client.Close()
	var work sync.WaitGroup
	defer work.Wait()
	work.Go(func() { ssh.DiscardRequests(reqs) })
	for nc := range chans {
		ch, reqs, err := nc.Accept()
		if err != nil {
			return
		}
		work.Go(func() {
			for req := range reqs {
				if req.Type != "exec" {
					_ = req.Reply(true, nil)
					continue
				}
				_ = req.Reply(true, nil)
				cmd := exec.CommandContext(ctx, "sh", "-c", string(req.Payload[4:]))
				cmd.Stdout, cmd.Stderr = ch, ch.Stderr()
				stdin, err := cmd.StdinPipe()
				if err != nil {
					return
				}
				work.Go(func() { // until the channel is closed
					_, _ = io.Copy(stdin, ch)
					_ = stdin.Close()
				})
				var exit *exec.ExitError
				code := uint32(0)
				if err := cmd.Run(); errors.As(err, &exit) {
					code = uint32(exit.ExitCode())
				}
				_, _ = ch.SendRequest("exit-status", false, ssh.Marshal(struct{ Code uint32 }{code}))
				_ = ch.Close()
			}
		})
	}
}

// result is how a command ended.
type result struct {
	out, err string
	code     int
}

// ssh runs OpenSSH's client with the installation's configuration.
func (in *installation) ssh(t *testing.T, stdin io.Reader, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "ssh", append([]string{"-F", in.config, "-o", "BatchMode=yes"}, args...)...)
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &out, &errs
	cmd.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0") // for proxyHelper
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return result{out: out.String(), err: errs.String(), code: cmd.ProcessState.ExitCode()}
}

// self is the path of the test program under the name helix, in folder.
func self(t *testing.T, folder string) string {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(folder, "helix")
	if err := os.Symlink(exe, path); err != nil {
		t.Fatal(err)
	}
	return path
}
