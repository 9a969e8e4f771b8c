package web

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"time"
)

// pools holds the idle connections to workspaces, one set for each way of
// speaking to them. Within a set net/http keys them by upstreamAddress.
//
// A connection that the service closed while it was idle is found out by
// net/http: it repeats requests that may be repeated, and those of which no
// byte was sent, on a fresh one.
type pools struct {
	http, https, h2c *http.Transport
}

// idleUpstream is shorter than what development servers wait (gunicorn 2 s,
// Node.js 5 s): whoever closes first cannot lose a request to the other's
// close. A new stream costs next to nothing.
const idleUpstream = 1500 * time.Millisecond

func newPools(s *Server) *pools {
	base := func() *http.Transport {
		return &http.Transport{
			DialContext:           s.dialUpstream,
			DisableCompression:    true, // bodies pass as they are
			MaxIdleConnsPerHost:   32,
			IdleConnTimeout:       idleUpstream,
			TLSHandshakeTimeout:   s.cfg.DialTimeout,
			ExpectContinueTimeout: time.Second, // RFC 9110, 10.1.1: do not wait for ever
			WriteBufferSize:       16 << 10,
			ReadBufferSize:        16 << 10,
		}
	}
	p := &pools{http: base(), https: base(), h2c: base()}
	p.https.TLSClientConfig = &tls.Config{
		// The stream under it is authenticated and encrypted, and the service's
		// certificate is for a name of its own, if it is for any.
		InsecureSkipVerify: true, //nolint:gosec // see above
		ServerName:         "localhost",
	}
	p.https.ForceAttemptHTTP2 = true
	p.h2c.Protocols = new(http.Protocols)
	p.h2c.Protocols.SetUnencryptedHTTP2(true)
	return p
}

// RoundTrip sends r, which the reverse proxy made for this one purpose, to the
// route that the handler put into its context.
func (p *pools) RoundTrip(r *http.Request) (*http.Response, error) {
	route, ok := r.Context().Value(routeKey{}).(Route)
	if !ok {
		return nil, errors.New("request has no route")
	}
	r.URL.Scheme = "http"
	switch route.Protocol {
	case ProtocolHTTPS, ProtocolTLS:
		r.URL.Scheme = "https"
		return p.https.RoundTrip(r)
	case ProtocolH2C:
		if r.Header.Get("Upgrade") == "" { // upgrades exist in HTTP/1.1 only
			return p.h2c.RoundTrip(r)
		}
	case ProtocolHTTP, "":
	}
	return p.http.RoundTrip(r)
}

func (p *pools) closeIdle() {
	p.http.CloseIdleConnections()
	p.https.CloseIdleConnections()
	p.h2c.CloseIdleConnections()
}

// dialUpstream opens a stream to what upstreamAddress named.
func (s *Server) dialUpstream(ctx context.Context, _, addr string) (net.Conn, error) {
	workspace, port, err := splitUpstream(addr)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, s.cfg.DialTimeout)
	defer cancel()
	c, err := s.cfg.Dial(ctx, workspace, port)
	if err == nil {
		return c, nil
	}
	if errors.Is(err, context.Canceled) {
		return nil, err
	}
	e := RouteError{Reason: ReasonTunnelDown, Workspace: workspace, Port: port}
	if errors.Is(err, context.DeadlineExceeded) {
		e.Reason = ReasonTimeout
	}
	return nil, asRouteError(err, e)
}
