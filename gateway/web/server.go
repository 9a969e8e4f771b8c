// Package web is the HTTP side of a gateway: an embedded Caddy that gets its
// connections from the gateway's listeners, its certificates from an own
// authority, and its upstreams from the live registry.
//
// Caddy runs one constant configuration. Nothing about it changes when
// workspaces come and go; [Config.Resolve] is asked at each request.
//
// Every request that finds no upstream is answered with the reason, in the
// X-Helix-Reason header and as a page, JSON or text: see [RouteError].
package web

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"
)

// Config is what a Server needs. The functions are called concurrently.
type Config struct {
	// Zones are the zones served, lower case, without dots at the ends; the
	// first is the one that new links are written with.
	Zones []string
	// CA signs the certificates. It must cover Zones.
	CA *CA
	// Storage is a folder that Caddy may write to.
	Storage string
	// Resolve says where a name of a workspace leads now, or a *RouteError why
	// it leads nowhere. It is called at each request and must not block.
	Resolve func(Name) (Route, error)
	// Dial connects to a port of a workspace, or returns a *RouteError. The
	// connection is closed by the Server. ctx ends after DialTimeout.
	Dial func(ctx context.Context, workspace string, port uint16) (net.Conn, error)
	// Gateway serves gw.ZONE and the bare zone; nil = 404.
	Gateway http.Handler
	// DialTimeout bounds one Dial; 0 = 10 s.
	DialTimeout time.Duration
	// Grace is how long requests in flight may go on after Run's context ends;
	// 0 = 5 s. WebSockets are told to close at once.
	Grace time.Duration
	// Log gets Caddy's own lines too; nil = none.
	Log *slog.Logger
}

// Validate reports every fault at once.
func (c *Config) Validate() error {
	var errs []error
	if len(c.Zones) == 0 {
		errs = append(errs, errors.New("zones: none given"))
	}
	if c.CA == nil {
		errs = append(errs, errors.New("ca: none given"))
	}
	if c.Storage == "" {
		errs = append(errs, errors.New("storage: no folder given"))
	}
	if c.Resolve == nil || c.Dial == nil {
		errs = append(errs, errors.New("resolve, dial: both are needed"))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("web configuration: %w", err)
	}
	return nil
}

// ErrClosed reports a connection handed over while Run is not running any more.
var ErrClosed = errors.New("web server closed")

// Server is one gateway's HTTP side.
type Server struct {
	cfg   Config
	id    string
	log   *slog.Logger
	ready chan struct{}

	plain, secure *inlet

	mu    sync.Mutex
	conns map[*handedConn]struct{}
	empty chan struct{} // closed when conns is empty and the server is stopping; nil before
}

// New makes a Server. It opens nothing.
func New(cfg Config) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.DialTimeout == 0 {
		cfg.DialTimeout = 10 * time.Second
	}
	if cfg.Grace == 0 {
		cfg.Grace = 5 * time.Second
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	var id [8]byte
	if _, err := rand.Read(id[:]); err != nil {
		return nil, fmt.Errorf("make instance name: %w", err)
	}
	return &Server{
		cfg:    cfg,
		id:     hex.EncodeToString(id[:]),
		log:    cfg.Log,
		ready:  make(chan struct{}),
		plain:  newInlet("http"),
		secure: newInlet("https"),
		conns:  map[*handedConn]struct{}{},
	}, nil
}

// Ready is closed when Run serves.
func (s *Server) Ready() <-chan struct{} { return s.ready }

// ServeTLS hands over a connection whose next bytes are a TLS ClientHello. It
// returns once Caddy has it; from then on the Server closes it. On an error,
// [ErrClosed] or ctx's, it is closed already.
func (s *Server) ServeTLS(ctx context.Context, c net.Conn) error { return s.hand(ctx, s.secure, c) }

// ServePlain does the same for a connection whose next bytes are HTTP.
func (s *Server) ServePlain(ctx context.Context, c net.Conn) error { return s.hand(ctx, s.plain, c) }

func (s *Server) hand(ctx context.Context, in *inlet, c net.Conn) error {
	h := &handedConn{Conn: c, server: s}
	s.mu.Lock()
	s.conns[h] = struct{}{}
	s.mu.Unlock()
	select {
	case in.conns <- h:
		return nil
	case <-in.closed:
		return errors.Join(ErrClosed, h.Close())
	case <-ctx.Done():
		return errors.Join(ctx.Err(), h.Close())
	}
}

// Run serves what is handed over until ctx is done, then drains for the grace
// time and returns nil. It may be called once.
func (s *Server) Run(ctx context.Context) error {
	registerModules()
	addInstance(s)
	defer removeInstance(s)
	apps, err := startCaddy(s)
	if err != nil {
		return fmt.Errorf("start web server: %w", errors.Join(err, s.drain(0)))
	}
	close(s.ready)
	<-ctx.Done()
	// Servers first: they stop accepting and let requests end. Unloading the
	// modules then ends the WebSockets, each with a close frame.
	err = apps.stopServers()
	apps.unload()
	if err := errors.Join(err, s.drain(s.cfg.Grace)); err != nil {
		return fmt.Errorf("stop web server: %w", err)
	}
	return nil
}

// drain waits until every connection handed over is closed, and closes the
// rest after the grace time.
func (s *Server) drain(grace time.Duration) error {
	s.plain.close()
	s.secure.close()
	s.mu.Lock()
	s.empty = make(chan struct{})
	empty := s.empty
	if len(s.conns) == 0 {
		close(empty)
	}
	s.mu.Unlock()
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case <-empty:
		return nil
	case <-timer.C:
	}
	s.mu.Lock()
	late := make([]*handedConn, 0, len(s.conns))
	for c := range s.conns {
		late = append(late, c)
	}
	s.mu.Unlock()
	for _, c := range late {
		if err := c.Close(); err != nil {
			s.log.Debug("close connection after the grace time", "err", err) //nolint:sloglint // no context is alive here
		}
	}
	<-empty
	return nil
}

func (s *Server) forget(c *handedConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
	if s.empty != nil && len(s.conns) == 0 {
		select {
		case <-s.empty:
		default:
			close(s.empty)
		}
	}
}

// handedConn is a connection in Caddy's hands.
type handedConn struct {
	net.Conn
	server *Server
	once   sync.Once
	err    error
}

// Close closes the connection and reports the first result ever after.
func (c *handedConn) Close() error {
	c.once.Do(func() {
		c.err = c.Conn.Close()
		c.server.forget(c)
	})
	return c.err
}

// CloseWrite lets the HTTP server end an answer whose request was not read to
// its end without a reset that would eat the answer.
func (c *handedConn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported
}

// inlet is the listener that Caddy accepts from.
type inlet struct {
	name   inletAddr
	conns  chan *handedConn
	once   sync.Once
	closed chan struct{}
}

type inletAddr string

func (inletAddr) Network() string  { return network }
func (a inletAddr) String() string { return string(a) }

func newInlet(name string) *inlet {
	return &inlet{name: inletAddr(name), conns: make(chan *handedConn), closed: make(chan struct{})}
}

// Accept waits for a connection.
func (in *inlet) Accept() (net.Conn, error) {
	select {
	case c := <-in.conns:
		return c, nil
	case <-in.closed:
		return nil, net.ErrClosed
	}
}

// Close ends Accept; connections already handed over stay.
func (in *inlet) Close() error {
	in.close()
	return nil
}

func (in *inlet) close() { in.once.Do(func() { close(in.closed) }) }

// Addr names the inlet.
func (in *inlet) Addr() net.Addr { return in.name }
