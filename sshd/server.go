package sshd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/crypto/ssh"
)

// errBusy reports a connection that was closed because too many others were
// logging in.
var errBusy = errors.New("too many connections are logging in")

// maxTries is how many keys a client may offer: agents hold many.
const maxTries = 30

// ServerConfig is what a Server is made of. Host, Allowed, Dial and Relay are
// needed; they are called concurrently.
type ServerConfig struct {
	// Host returns the identity of the gateway (GatewayName) or of a workspace.
	Host func(name string) (Host, error)
	// Allowed reports whether a user with key may log in.
	Allowed func(key ssh.PublicKey) bool
	// Dial connects to a port of a workspace. The host is the workspace's name, or
	// an address as the client gave it. The client shows the text of an error, and
	// its Hint; one that wraps ErrProhibited says that asking again is no use.
	Dial func(ctx context.Context, host string, port uint16) (Conn, error)
	// Relay copies both ways between a channel and what Dial returned, passes on
	// half-closes, ends both and returns when both directions have ended. A Conn of
	// this package has Reset(reason string) error too.
	Relay func(ctx context.Context, channel, upstream Conn) error
	// Client returns what is needed to log in at a workspace, see
	// Keys.ClientConfig. With it, a client whose user name is that of a workspace
	// gets its SSH sessions there. Nil: the jump host has no SSH sessions.
	Client func(workspace, user string) *ssh.ClientConfig

	Zones        []string      // none: helix.local and helix.internal
	AuthTimeout  time.Duration // until a client must have logged in; 0: 20 s
	MaxStartups  int           // clients logging in at once; 0: 64
	MaxPerSource int           // of these from one IP address; 0: 16
	MaxChannels  int           // open channels of one connection; 0: 512
	Linger       time.Duration // how long what a client left behind may take to reach its upstream; 0: 30 s
	Log          *slog.Logger  // nil: nothing is logged
}

// Validate reports every fault at once.
func (c ServerConfig) Validate() error {
	var faults []error
	missing := func(name string, is bool) {
		if is {
			faults = append(faults, fmt.Errorf("ssh server: %s is missing", name))
		}
	}
	missing("Host", c.Host == nil)
	missing("Allowed", c.Allowed == nil)
	missing("Dial", c.Dial == nil)
	missing("Relay", c.Relay == nil)
	if c.AuthTimeout < 0 || c.MaxStartups < 0 || c.MaxPerSource < 0 || c.MaxChannels < 0 || c.Linger < 0 {
		faults = append(faults, errors.New("ssh server: a limit is negative"))
	}
	return errors.Join(faults...)
}

// Server is the jump host, and answers in place of workspaces that cannot be
// reached.
type Server struct {
	cfg ServerConfig

	mu       sync.Mutex
	starting map[string]int // clients logging in, by source; guarded by mu
	startups int            // their sum; guarded by mu
}

// NewServer returns a server that does nothing yet.
func NewServer(cfg ServerConfig) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg.Zones = defaultZones(cfg.Zones)
	orDefault(&cfg.AuthTimeout, 20*time.Second)
	orDefault(&cfg.MaxStartups, 64)
	orDefault(&cfg.MaxPerSource, 16)
	orDefault(&cfg.MaxChannels, 512)
	orDefault(&cfg.Linger, 30*time.Second)
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Server{cfg: cfg, starting: map[string]int{}}, nil
}

func orDefault[T time.Duration | int](v *T, def T) {
	if *v == 0 {
		*v = def
	}
}

// Serve accepts clients of the jump host from ln until ctx is done. It closes
// ln, waits for every connection, and returns nil after such a stop.
func (s *Server) Serve(ctx context.Context, ln net.Listener) error {
	stop := context.AfterFunc(ctx, func() { _ = ln.Close() }) // Accept reports it
	defer stop()
	defer func() { _ = ln.Close() }()
	var conns sync.WaitGroup
	defer conns.Wait()
	for {
		conn, err := ln.Accept()
		if ctx.Err() != nil {
			if err == nil {
				_ = conn.Close() // came too late
			}
			return nil
		}
		if err != nil {
			if !passing(err) {
				return fmt.Errorf("accept ssh client: %w", err)
			}
			s.cfg.Log.WarnContext(ctx, "ssh client not accepted", "err", err)
			select {
			case <-ctx.Done():
			case <-time.After(100 * time.Millisecond):
			}
			continue
		}
		conns.Go(func() {
			if err := s.ServeConn(ctx, conn); err != nil {
				s.cfg.Log.DebugContext(ctx, "ssh connection ended", "peer", conn.RemoteAddr(), "err", err)
			}
		})
	}
}

// passing reports an error of Accept after which the next one may succeed.
func passing(err error) bool {
	for _, e := range []syscall.Errno{syscall.EMFILE, syscall.ENFILE, syscall.ECONNABORTED, syscall.ENOBUFS, syscall.ENOMEM} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// ServeConn serves one client of the jump host until it leaves or ctx is done,
// and closes conn. It returns why the client was not let in.
func (s *Server) ServeConn(ctx context.Context, conn net.Conn) error {
	return s.serve(ctx, conn, GatewayName, s.jump)
}

// ServeUnavailable answers one client in place of the workspace name, as the
// workspace's own host, until the client leaves or ctx is done, and closes conn.
// Every program that an authorized client starts ends at once with reason as one
// line on its standard error and status 255; every other channel is refused
// with reason. The connection is closed some seconds after its last channel, so
// that a client which keeps it for later does not keep the answer too.
func (s *Server) ServeUnavailable(ctx context.Context, conn net.Conn, name, reason string) error {
	reason = oneLine(reason)
	return s.serve(ctx, conn, name, func(ctx context.Context, _ *transport, _ string, chans <-chan ssh.NewChannel) {
		refuseAll(ctx, chans, reason)
	})
}

// serve logs a client in at the host name and gives its channels to work.
func (s *Server) serve(ctx context.Context, conn net.Conn, name string,
	work func(ctx context.Context, t *transport, user string, chans <-chan ssh.NewChannel),
) error {
	defer func() { _ = conn.Close() }() // ended one way or the other
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	source, ok := s.enter(conn)
	if !ok {
		return errBusy
	}
	t := &transport{Conn: conn}
	client, chans, reqs, err := s.login(t, name)
	s.leave(source)
	if err != nil {
		return fmt.Errorf("log in at %s: %w", name, err)
	}
	defer func() { _ = client.Close() }() // closes conn
	s.cfg.Log.DebugContext(ctx, "ssh client logged in", "workspace", name, "peer", conn.RemoteAddr(), "user", oneLine(client.User()))
	var requests sync.WaitGroup
	defer requests.Wait()
	defer func() { _ = client.Close() }() // ends the requests
	requests.Go(func() { ssh.DiscardRequests(reqs) })
	work(ctx, t, client.User(), chans)
	return nil
}

// login does the handshake under the deadline for it.
func (s *Server) login(t *transport, name string) (*ssh.ServerConn, <-chan ssh.NewChannel, <-chan *ssh.Request, error) {
	host, err := s.cfg.Host(name)
	if err != nil {
		return nil, nil, nil, err
	}
	cfg := &ssh.ServerConfig{
		ServerVersion: "SSH-2.0-Helix",
		MaxAuthTries:  maxTries,
		PublicKeyCallback: func(_ ssh.ConnMetadata, key ssh.PublicKey) (*ssh.Permissions, error) {
			if !s.cfg.Allowed(key) {
				return nil, errors.New("key not authorized")
			}
			return nil, nil // all authorized keys may do the same
		},
	}
	cfg.AddHostKey(host.Cert)
	cfg.AddHostKey(host.Signer)
	if err := t.SetDeadline(time.Now().Add(s.cfg.AuthTimeout)); err != nil {
		return nil, nil, nil, err
	}
	client, chans, reqs, err := ssh.NewServerConn(t, cfg)
	if err != nil {
		return nil, nil, nil, err
	}
	t.ready.Store(true)
	if err := t.SetDeadline(time.Time{}); err != nil {
		_ = client.Close() // the first error says more
		return nil, nil, nil, err
	}
	return client, chans, reqs, nil
}

// enter counts a client that begins to log in, if there is room for it. Clients
// from this machine have all one address, or none, and count in the sum only.
func (s *Server) enter(conn net.Conn) (source string, ok bool) {
	if addr, is := conn.RemoteAddr().(*net.TCPAddr); is && !addr.IP.IsLoopback() {
		source = addr.IP.String()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.startups >= s.cfg.MaxStartups || source != "" && s.starting[source] >= s.cfg.MaxPerSource {
		return "", false
	}
	s.startups++
	s.starting[source]++
	return source, true
}

func (s *Server) leave(source string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.startups--
	if s.starting[source]--; s.starting[source] == 0 {
		delete(s.starting, source)
	}
}

// transport is a client's connection. It knows whether it has ended, which the
// channels above it cannot tell from an orderly end of their own.
type transport struct {
	net.Conn
	ready atomic.Bool // the client is logged in
	dead  atomic.Bool // nothing more comes
}

func (t *transport) Read(p []byte) (int, error) {
	if !t.ready.Load() {
		quickAck(t.Conn)
	}
	n, err := t.Conn.Read(p)
	if err != nil {
		t.dead.Store(true)
	}
	return n, err
}
