package sshd

import (
	"context"
	"errors"
	"io"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"
)

// jumpHost serves keys on a listener until the test ends.
func jumpHost(t *testing.T, keys *Keys, change func(*ServerConfig)) net.Addr {
	t.Helper()
	cfg := ServerConfig{
		Host:    func(name string) (Host, error) { return keys.Host(name) },
		Allowed: keys.IsClient,
		Dial:    func(context.Context, string, uint16) (Conn, error) { return nil, errors.New("nothing\nthere\x1b") },
		Relay:   func(context.Context, Conn, Conn) error { return nil },
	}
	change(&cfg)
	server, err := NewServer(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- server.Serve(ctx, ln) }()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	return ln.Addr()
}

func dialGateway(t *testing.T, keys *Keys, addr net.Addr) *ssh.Client {
	t.Helper()
	client, err := ssh.Dial("tcp", addr.String(), keys.ClientConfig(GatewayName, "helix"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	return client
}

func TestServerLimitsLogins(t *testing.T) {
	keys := openKeys(t, filepath.Join(t.TempDir(), "ssh"))
	for name, limit := range map[string]func(*ServerConfig){
		"sum": func(c *ServerConfig) { c.MaxStartups = 2 },
	} {
		addr := jumpHost(t, keys, limit)
		client := dialGateway(t, keys, addr)
		if _, _, err := client.SendRequest("keepalive@openssh.com", true, nil); err != nil { // logged in: counts no more
			t.Fatal(err)
		}
		var slow []net.Conn
		for range 2 {
			conn, err := net.Dial("tcp", addr.String())
			if err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(conn, make([]byte, 7)); err != nil {
				t.Fatal(err)
			}
			slow = append(slow, conn)
		}
		conn, err := net.Dial("tcp", addr.String())
		if err != nil {
			t.Fatal(err)
		}
		if n, err := conn.Read(make([]byte, 1)); n != 0 || err == nil {
			t.Errorf("%s: a third one was served", name)
		}
		for _, c := range append(slow, conn) {
			_ = c.Close()
		}
	}
}

// from is a connection of which only the far address is known.
type from struct {
	net.Conn
	addr net.Addr
}

func (f from) RemoteAddr() net.Addr { return f.addr }

func TestServerLimitsSources(t *testing.T) {
	s := &Server{cfg: ServerConfig{MaxStartups: 100, MaxPerSource: 2}, starting: map[string]int{}}
	tcp := func(ip string) from { return from{addr: &net.TCPAddr{IP: net.ParseIP(ip), Port: 1}} }
	for _, c := range []struct {
		conn from
		want bool
	}{
		{tcp("192.0.2.1"), true},
		{tcp("192.0.2.1"), true},
		{tcp("192.0.2.1"), false},
		{tcp("192.0.2.2"), true},
		// The whole of this machine is one source, and not a stranger.
		{tcp("127.0.0.1"), true},
		{tcp("127.0.0.1"), true},
		{tcp("127.0.0.1"), true},
		{from{addr: &net.UnixAddr{}}, true},
		{from{addr: &net.UnixAddr{}}, true},
		{from{addr: &net.UnixAddr{}}, true},
	} {
		if _, ok := s.enter(c.conn); ok != c.want {
			t.Errorf("%v: let in %v, want %v", c.conn.addr, ok, c.want)
		}
	}
	s.leave("192.0.2.1")
	if _, ok := s.enter(tcp("192.0.2.1")); !ok {
		t.Error("a place that is free again is not given")
	}
}

func TestServerLoginDeadline(t *testing.T) {
	keys := openKeys(t, filepath.Join(t.TempDir(), "ssh"))
	addr := jumpHost(t, keys, func(c *ServerConfig) { c.AuthTimeout = 500 * time.Millisecond })
	client := dialGateway(t, keys, addr)
	conn, err := net.Dial("tcp", addr.String()) // its deadline is the later one
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.Copy(io.Discard, conn); err != nil && !strings.Contains(err.Error(), "reset") {
		t.Errorf("got %v", err)
	}
	if _, _, err := client.SendRequest("keepalive@openssh.com", true, nil); err != nil {
		t.Errorf("keepalive: %v", err)
	}
}

func TestServerRefusesChannels(t *testing.T) {
	keys := openKeys(t, filepath.Join(t.TempDir(), "ssh"))
	addr := jumpHost(t, keys, func(c *ServerConfig) { c.MaxChannels = 10 })
	client := dialGateway(t, keys, addr)
	tcp := func(host string, port uint32) []byte { return ssh.Marshal(directTCPIP{Host: host, Port: port}) }
	for name, c := range map[string]struct {
		kind   string
		extra  []byte
		reason ssh.RejectionReason
		text   string
	}{
		"dial error": {"direct-tcpip", tcp("alpha", 80), ssh.ConnectionFailed, "nothing there"},
		"no port":    {"direct-tcpip", tcp("alpha", 0), ssh.Prohibited, "alpha port 0"},
		"high port":  {"direct-tcpip", tcp("alpha", 65536), ssh.Prohibited, "alpha port 65536"},
		"bad host":   {"direct-tcpip", tcp("a\nb", 1), ssh.Prohibited, "a b port 1"},
		"malformed":  {"direct-tcpip", []byte{1}, ssh.ConnectionFailed, "malformed"},
		"unix":       {"direct-streamlocal@openssh.com", nil, ssh.Prohibited, "TCP ports only"},
		"unknown":    {"x11", nil, ssh.UnknownChannelType, "unknown channel type"},
	} {
		_, _, err := client.OpenChannel(c.kind, c.extra)
		var open *ssh.OpenChannelError
		if !errors.As(err, &open) || open.Reason != c.reason || !strings.Contains(open.Message, c.text) || strings.ContainsAny(open.Message, "\n\x1b") {
			t.Errorf("%s: got %v", name, err)
		}
	}
	if ok, _, err := client.SendRequest("tcpip-forward", true, nil); ok || err != nil {
		t.Errorf("tcpip-forward: %t, %v", ok, err)
	}
	client = dialGateway(t, keys, addr)
	for n := range 11 {
		_, reqs, err := client.OpenChannel("session", nil)
		if err == nil && n < 10 {
			go ssh.DiscardRequests(reqs)
			continue
		}
		if n < 10 || err == nil || !strings.Contains(err.Error(), "too many") {
			t.Errorf("channel %d: %v", n, err)
		}
	}
}

func TestServerWithoutItsKey(t *testing.T) {
	keys := openKeys(t, filepath.Join(t.TempDir(), "ssh"))
	addr := jumpHost(t, keys, func(c *ServerConfig) {
		c.Host = func(string) (Host, error) { return Host{}, errors.New("no key") }
	})
	if _, err := ssh.Dial("tcp", addr.String(), keys.ClientConfig(GatewayName, "helix")); err == nil {
		t.Error("logged in")
	}
}

func TestNewServerReportsEveryFault(t *testing.T) {
	_, err := NewServer(ServerConfig{MaxStartups: -1})
	for _, want := range []string{"Host", "Allowed", "Dial", "Relay", "negative"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s in it", err, want)
		}
	}
}

func TestServeReportsBrokenListener(t *testing.T) {
	keys := openKeys(t, filepath.Join(t.TempDir(), "ssh"))
	server, err := NewServer(ServerConfig{
		Host:    func(name string) (Host, error) { return keys.Host(name) },
		Allowed: keys.IsClient, Dial: func(context.Context, string, uint16) (Conn, error) { return nil, ErrProhibited },
		Relay: func(context.Context, Conn, Conn) error { return nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = ln.Close()
	if err := server.Serve(t.Context(), ln); err == nil {
		t.Error("no error")
	}
}

func TestOneLine(t *testing.T) {
	for text, want := range map[string]string{
		"plain\n":                "plain",
		"a\r\nb\tc\x1b[1m":       "a  b c [1m",
		"\xff":                   "?",
		"ünï":                    "ünï",
		"\u202eright":            " right",
		strings.Repeat("ü", 300): strings.Repeat("ü", 200) + "...",
	} {
		if got := oneLine(text); got != want {
			t.Errorf("oneLine(%q) = %q, want %q", text, got, want)
		}
	}
}

func TestChannelHasNoDeadlines(t *testing.T) {
	c := &channel{}
	if slices.Contains([]error{c.SetDeadline(time.Now()), c.SetReadDeadline(time.Now()), c.SetWriteDeadline(time.Now())}, nil) {
		t.Error("a deadline was taken")
	}
}
