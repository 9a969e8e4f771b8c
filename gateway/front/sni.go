package front

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/inetaf/tcpproxy"
)

// SNIConfig is what an SNI needs.
type SNIConfig struct {
	// Passthrough finds the service that terminates TLS for a server name
	// itself, lower case and without final dot. It must not block.
	Passthrough func(serverName string) (Dial, bool)
	// Relay copies between the client and such a service until both
	// directions have ended, and closes both.
	Relay func(ctx context.Context, client, service Conn) error
	// Terminate takes every other connection, also those that send no server
	// name or no TLS. It owns the connection.
	Terminate func(ctx context.Context, c Conn)
	// HelloTimeout bounds the wait for the client's first bytes; 0 = 10 s.
	HelloTimeout time.Duration
	Log          *slog.Logger // nil = none
}

// SNI sends TLS connections where their server name (RFC 6066, section 3) says.
type SNI struct {
	cfg   SNIConfig
	inlet inlet
}

// NewSNI makes an SNI.
func NewSNI(cfg SNIConfig) *SNI {
	if cfg.HelloTimeout == 0 {
		cfg.HelloTimeout = 10 * time.Second
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &SNI{cfg: cfg, inlet: inlet{conns: make(chan net.Conn), closed: make(chan struct{})}}
}

// Run looks at the connections given to Handle until ctx is done.
func (s *SNI) Run(ctx context.Context) error {
	proxy := tcpproxy.Proxy{ListenFunc: func(string, string) (net.Listener, error) { return &s.inlet, nil }}
	proxy.AddSNIRouteFunc(sniRoute, func(_ context.Context, name string) (tcpproxy.Target, bool) {
		dial, ok := s.cfg.Passthrough(strings.ToLower(strings.TrimSuffix(name, ".")))
		return target{dial}, ok
	})
	proxy.AddRoute(sniRoute, target{}) // always matches, so every connection comes back
	if err := proxy.Start(); err != nil {
		return fmt.Errorf("start server name routes: %w", err)
	}
	<-ctx.Done()
	if err := proxy.Close(); err != nil {
		return fmt.Errorf("stop server name routes: %w", err)
	}
	if err := proxy.Wait(); !errors.Is(err, net.ErrClosed) {
		return fmt.Errorf("server name routes: %w", err)
	}
	return nil
}

// Handle serves c: it passes it through, or on to Terminate. It returns when
// c has a new owner or is closed.
func (s *SNI) Handle(ctx context.Context, c net.Conn) {
	h := &hello{Conn: c, done: make(chan decision, 1)}
	d, err := s.decide(ctx, h)
	switch {
	case err != nil:
		s.cfg.Log.DebugContext(ctx, "no first bytes", "peer", c.RemoteAddr().String(), "err", err)
		_ = c.Close() // there is nothing to tell a client that said nothing
	case d.dial == nil:
		s.cfg.Terminate(ctx, &peeked{c, d.head})
	default:
		s.pass(ctx, &peeked{c, d.head}, d.dial)
	}
}

// decide lets tcpproxy read the first bytes, under the deadline.
func (s *SNI) decide(ctx context.Context, h *hello) (decision, error) {
	if err := h.SetReadDeadline(time.Now().Add(s.cfg.HelloTimeout)); err != nil {
		return decision{}, err
	}
	stop := context.AfterFunc(ctx, func() { _ = h.SetReadDeadline(time.Unix(1, 0)) })
	select {
	case s.inlet.conns <- h:
	case <-s.inlet.closed:
		stop()
		return decision{}, ErrClosed
	case <-ctx.Done():
		stop()
		return decision{}, ctx.Err()
	}
	d := <-h.done // the deadline bounds this wait
	if !stop() || ctx.Err() != nil {
		return decision{}, context.Cause(ctx)
	}
	// A client that closed its side after a few bytes may still be answered;
	// one that sent none, or stalled, may not.
	if h.err != nil && (len(d.head) == 0 || !errors.Is(h.err, io.EOF)) {
		return decision{}, h.err
	}
	return d, h.SetReadDeadline(time.Time{})
}

func (s *SNI) pass(ctx context.Context, client *peeked, dial Dial) {
	service, err := dial(ctx)
	if err != nil {
		s.cfg.Log.DebugContext(ctx, "pass TLS through", "peer", client.RemoteAddr().String(), "err", err)
		if err := Reset(client); err != nil {
			s.cfg.Log.DebugContext(ctx, "reset client", "err", err)
		}
		return
	}
	if err := s.cfg.Relay(ctx, client, service); err != nil {
		s.cfg.Log.DebugContext(ctx, "relay TLS", "peer", client.RemoteAddr().String(), "err", err)
	}
}

// sniRoute is the one listener that tcpproxy knows; the name means nothing.
const sniRoute = "sni:443"

// hello is a connection whose first bytes tcpproxy reads.
type hello struct {
	net.Conn
	err  error // of the last Read
	done chan decision
}

// Read notes the error, which tcpproxy does not report.
func (h *hello) Read(p []byte) (int, error) {
	n, err := h.Conn.Read(p)
	h.err = err
	return n, err
}

// decision is what the first bytes meant.
type decision struct {
	head []byte
	dial Dial // nil = terminate
}

// target reports its decision to whoever waits in Handle, where the work is
// done: the goroutines of tcpproxy have no owner and must be short.
type target struct{ dial Dial }

// HandleConn implements tcpproxy.Target.
func (t target) HandleConn(c net.Conn) {
	d := decision{dial: t.dial}
	if p, ok := c.(*tcpproxy.Conn); ok {
		d.head = p.Peeked
		c = p.Conn
	}
	c.(*hello).done <- d
}

// inlet is the listener that tcpproxy accepts from.
type inlet struct {
	conns  chan net.Conn
	once   sync.Once
	closed chan struct{}
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

// Close ends Accept.
func (in *inlet) Close() error {
	in.once.Do(func() { close(in.closed) })
	return nil
}

// Addr is needed by net.Listener only.
func (in *inlet) Addr() net.Addr { return &net.TCPAddr{} }
