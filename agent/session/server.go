// Package session is the SSH server of a target: shells, commands, sftp, port
// and socket forwards (RFC 4252 to 4254, and OpenSSH's PROTOCOL document for
// the extensions with @openssh.com in their names).
//
// gliderlabs/ssh is the frame that does the handshake and hands out channels;
// every channel and request has its handler here.
//
// A connection that comes before [Server.SetIdentity] fails with
// [ErrNoIdentity]. Nothing is ever written to the standard output of a command
// but what the command wrote.
package session

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

	"github.com/gliderlabs/ssh"
	gossh "golang.org/x/crypto/ssh"

	"helix.local/helix/agent/process"
	"helix.local/helix/agent/wire"
)

const (
	handshakeTime = 30 * time.Second // for key exchange and login together
	// Keys are public: offering many is not guessing. People have dozens in
	// their ssh agent, and the right one may be the last.
	authTries = 64
)

// ErrNoIdentity reports that the gateway has not sent host keys yet.
var ErrNoIdentity = errors.New("ssh identity not set")

// Config is what a Server needs to know. Accounts is required.
type Config struct {
	// Accounts finds whom a login name stands for.
	Accounts func(login string) (Account, error)
	// Env is where every program's environment starts, as NAME=value.
	Env []string
	// Dir is where programs start; "" means the account's home.
	Dir string
	// Reaper starts the programs; nil is right unless this process adopts orphans.
	Reaper *process.Reaper
	// SFTPServer is the command that serves sftp on its standard streams. It is
	// used for accounts other than the one this process runs as.
	SFTPServer []string
	// DialTCP connects what `ssh -L` and `ssh -W` ask for; nil means net.Dialer.
	DialTCP func(ctx context.Context, host string, port uint16) (net.Conn, error)
	// Log may be nil.
	Log *slog.Logger
}

// Server serves SSH connections. Its methods may be called concurrently.
type Server struct {
	cfg      Config
	log      *slog.Logger
	identity atomic.Pointer[identity]
	programs sync.WaitGroup // waits of programs, which may outlive their connection

	mu      sync.Mutex
	running map[*program]struct{}
}

// New returns a Server without an identity.
func New(cfg Config) (*Server, error) {
	if cfg.Accounts == nil {
		return nil, errors.New("session: Accounts is required")
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.DialTCP == nil {
		cfg.DialTCP = dialTCP
	}
	return &Server{cfg: cfg, log: cfg.Log, running: make(map[*program]struct{})}, nil
}

// Ready reports whether the server has its identity.
func (s *Server) Ready() bool { return s.identity.Load() != nil }

// SetIdentity replaces host keys and authorized keys for connections to come.
func (s *Server) SetIdentity(id wire.Identity) error {
	parsed, skipped, err := parseIdentity(id)
	if err != nil {
		return err
	}
	for _, reason := range skipped {
		s.log.Warn("authorized key skipped", "err", reason)
	}
	s.identity.Store(parsed)
	return nil
}

// ServeConn serves one connection to its end and closes it. It returns when
// all of the connection's goroutines have ended; programs that the connection
// started may go on.
func (s *Server) ServeConn(ctx context.Context, nc net.Conn) error {
	defer func() { _ = nc.Close() }() // closed by the frame before; this is for the early ways out
	id := s.identity.Load()
	if id == nil {
		return fmt.Errorf("serve ssh: %w", ErrNoIdentity)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = nc.Close() })
	defer stop()
	late := time.AfterFunc(handshakeTime, func() { _ = nc.Close() })
	defer late.Stop()

	nc, ciphers, err := peekVersion(nc)
	if err != nil {
		return fmt.Errorf("serve ssh: %w", err)
	}
	c := newConnection(s, ctx, nc)
	var failed error
	frame := &ssh.Server{
		// Without a handler of its own the frame lets everybody in.
		PublicKeyHandler:         func(_ ssh.Context, key ssh.PublicKey) bool { return id.allows(key) },
		ServerConfigCallback:     func(ssh.Context) *gossh.ServerConfig { return id.serverConfig(ciphers, late) },
		ChannelHandlers:          c.channelHandlers(),
		RequestHandlers:          c.requestHandlers(),
		ConnectionFailedCallback: func(_ net.Conn, err error) { failed = err },
	}
	frame.HandleConn(noDeadlines{nc})
	cancel()
	c.end()
	if failed != nil {
		return fmt.Errorf("serve ssh: %w", failed)
	}
	return nil
}

// Close hangs up every program that still runs, kills what is left after grace
// and waits for the end of all.
func (s *Server) Close(grace time.Duration) error {
	err := s.signalAll(syscall.SIGHUP)
	kill := time.AfterFunc(grace, func() {
		if err := s.signalAll(syscall.SIGKILL); err != nil {
			s.log.Warn("program not killed", "err", err)
		}
	})
	defer kill.Stop()
	s.programs.Wait()
	return err
}

func (s *Server) signalAll(sig syscall.Signal) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var failed []error
	for p := range s.running {
		failed = append(failed, p.child.SignalGroup(sig))
	}
	return errors.Join(failed...)
}

// track waits for the program in a goroutine of the server, so that it is
// reaped also when its connection is long gone.
func (s *Server) track(p *program) {
	s.mu.Lock()
	s.running[p] = struct{}{}
	s.mu.Unlock()
	s.programs.Go(func() {
		p.end = p.child.Wait()
		close(p.ended)
		s.mu.Lock()
		delete(s.running, p)
		s.mu.Unlock()
	})
}

// noDeadlines keeps the frame from resetting a deadline at every Read and
// Write; the connection's only limit is the handshake timer.
type noDeadlines struct{ net.Conn }

func (noDeadlines) SetDeadline(time.Time) error { return nil }
