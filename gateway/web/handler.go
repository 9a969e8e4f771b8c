package web

import (
	"context"
	"errors"
	"net"
	"net/http"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// upstreamVar is the variable that the Caddyfile's reverse_proxy dials.
const upstreamVar = "helix_upstream"

type routeKey struct{}

// serve answers one request: it finds the route and lets next, the reverse
// proxy, carry the request there.
func (s *Server) serve(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	w.Header().Del("Server")
	name, ok := ParseName(r.Host, s.cfg.Zones)
	if !ok {
		return s.fail(w, r, name, &RouteError{Reason: ReasonUnknownHost})
	}
	if r.TLS != nil && s.misdirected(r.TLS.ServerName, name) {
		return s.fail(w, r, name, &RouteError{Reason: ReasonMisdirected, Workspace: name.Workspace})
	}
	if name.Gateway() {
		if s.cfg.Gateway == nil {
			return s.fail(w, r, name, &RouteError{Reason: ReasonUnknownHost})
		}
		s.cfg.Gateway.ServeHTTP(w, r)
		return nil
	}
	route, err := s.cfg.Resolve(name)
	if err != nil {
		return s.fail(w, r, name, asRouteError(err, RouteError{Reason: ReasonTunnelDown, Workspace: name.Workspace}))
	}
	setForwarded(r)
	caddyhttp.SetVar(r.Context(), upstreamVar, upstreamAddress(route))
	err = next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), routeKey{}, route)))
	if err == nil || r.Context().Err() != nil {
		return nil // served, or nobody is there to be told
	}
	return s.fail(w, r, name, proxyError(err, route))
}

// misdirected reports whether a request for name came over a connection that
// was made for another workspace (RFC 9110, 15.5.20). Browsers reuse an HTTP/2
// connection for every name its certificate and address fit.
func (s *Server) misdirected(serverName string, name Name) bool {
	if serverName == "" {
		return false
	}
	sni, ok := ParseName(serverName, s.cfg.Zones)
	return !ok || sni.Workspace != name.Workspace && !(sni.Gateway() && name.Gateway())
}

// setForwarded drops what the client claims about proxies before us. The
// reverse proxy sets X-Forwarded-For, -Proto and -Host afterwards.
func setForwarded(r *http.Request) {
	for key := range r.Header {
		if strings.HasPrefix(key, "X-Forwarded-") {
			delete(r.Header, key)
		}
	}
	for _, key := range []string{"Forwarded", "X-Real-Ip"} {
		delete(r.Header, key)
	}
	port := "80"
	if r.TLS != nil {
		port = "443"
	}
	// The port the client sees: behind a fallback port it is in the Host header.
	if _, p, err := net.SplitHostPort(r.Host); err == nil {
		port = p
	}
	r.Header["X-Forwarded-Port"] = []string{port}
}

// upstreamAddress names the connection pool of a route, and is what
// splitUpstream reads.
func upstreamAddress(route Route) string {
	host := route.Workspace
	if route.Pool != "" {
		host += "." + strings.Map(func(c rune) rune {
			if c < 0x80 && validLabel("a"+strings.ToLower(string(c))+"a") {
				return c
			}
			return '-'
		}, route.Pool)
	}
	return net.JoinHostPort(host, strconv.Itoa(int(route.Port)))
}

func splitUpstream(addr string) (workspace string, port uint16, err error) {
	host, p, err := net.SplitHostPort(addr)
	if err != nil {
		return "", 0, err
	}
	n, err := strconv.ParseUint(p, 10, 16)
	if err != nil {
		return "", 0, err
	}
	workspace, _, _ = strings.Cut(host, ".")
	return workspace, uint16(n), nil
}

// proxyError says why the reverse proxy got no answer from route.
func proxyError(err error, route Route) *RouteError {
	e := RouteError{Reason: ReasonBadAnswer, Workspace: route.Workspace, Port: route.Port}
	var timeout net.Error
	if errors.As(err, &timeout) && timeout.Timeout() || errors.Is(err, context.DeadlineExceeded) {
		e.Reason = ReasonTimeout
	}
	return asRouteError(err, e)
}

// fail answers with the reason. It is the last thing that happens to a request.
func (s *Server) fail(w http.ResponseWriter, r *http.Request, name Name, e *RouteError) error {
	s.log.DebugContext(r.Context(), "no upstream", "workspace", e.Workspace, "host", name.Host, "reason", string(e.Reason), "err", e)
	return writePage(w, r, s.page(r, name, e))
}
