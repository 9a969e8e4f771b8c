package web

import (
	"context"
	"crypto/tls"
	"fmt"
	"log"
	"net"
	"net/http"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddytls"
	"github.com/caddyserver/certmagic"
)

// network is the name under which Caddy finds the in-process listeners.
const network = "helix"

// registerModules makes the modules below known to Caddy, once a process.
func registerModules() {
	registerOnce.Do(func() {
		// Caddy's first logger writes to standard error, one line even when it
		// is replaced. Hold that line back for the logger that follows.
		caddy.BufferedLog()
		// It has also taken over the log package of the whole process, for that
		// first logger. Let those lines follow the others.
		log.SetFlags(0)
		log.SetOutput(stdLog{})
		caddy.RegisterNetwork(network, listen)
		caddy.RegisterModule(handlerModule{})
		caddy.RegisterModule(transportModule{})
		caddy.RegisterModule(permissionModule{})
		caddy.RegisterModule(managerModule{})
		caddy.RegisterModule(logModule{})
		httpcaddyfile.RegisterHandlerDirective("helix", parseHandler)
	})
}

// listen gives Caddy the inlet of the instance that host names.
func listen(_ context.Context, _, host, port string, _ uint, _ net.ListenConfig) (any, error) {
	s, err := instance(host)
	if err != nil {
		return nil, err
	}
	switch port {
	case "80":
		return s.plain, nil
	case "443":
		return s.secure, nil
	}
	return nil, fmt.Errorf("no in-process listener for port %s", port)
}

// module is what all modules share: the name of their instance, and the
// instance once they are provisioned.
type module struct {
	ID     string `json:"id"`
	server *Server
}

// UnmarshalCaddyfile reads the instance's name, the only argument.
func (m *module) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	if !d.AllArgs(&m.ID) {
		return d.ArgErr()
	}
	return nil
}

// Provision finds the instance.
func (m *module) Provision(caddy.Context) error {
	var err error
	m.server, err = instance(m.ID)
	return err
}

// handlerModule resolves the host name before the reverse proxy runs.
type handlerModule struct{ module }

// CaddyModule describes the module.
func (handlerModule) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.helix", New: func() caddy.Module { return new(handlerModule) }}
}

func parseHandler(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	m := new(handlerModule)
	return m, m.UnmarshalCaddyfile(h.Dispenser)
}

// ServeHTTP implements caddyhttp.MiddlewareHandler.
func (m *handlerModule) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	return m.server.serve(w, r, next)
}

// transportModule carries requests to the workspaces.
type transportModule struct {
	module
	pools *pools
}

// CaddyModule describes the module.
func (transportModule) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.reverse_proxy.transport.helix", New: func() caddy.Module { return new(transportModule) }}
}

// Provision finds the instance and makes its connection pools.
func (m *transportModule) Provision(ctx caddy.Context) error {
	if err := m.module.Provision(ctx); err != nil {
		return err
	}
	m.pools = newPools(m.server)
	return nil
}

// RoundTrip implements http.RoundTripper.
func (m *transportModule) RoundTrip(r *http.Request) (*http.Response, error) {
	return m.pools.RoundTrip(r)
}

// Cleanup closes idle connections.
func (m *transportModule) Cleanup() error {
	m.pools.closeIdle()
	return nil
}

// permissionModule decides which names get a certificate: every name of the
// zones, known or not. A browser that asks for an unknown workspace is to see
// the page that says so, not a TLS alert.
type permissionModule struct{ module }

// CaddyModule describes the module.
func (permissionModule) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "tls.permission.helix", New: func() caddy.Module { return new(permissionModule) }}
}

// CertificateAllowed implements caddytls.OnDemandPermission.
func (m *permissionModule) CertificateAllowed(_ context.Context, name string) error {
	if _, ok := ParseName(name, m.server.cfg.Zones); ok {
		return nil
	}
	return fmt.Errorf("%q: %w", name, caddytls.ErrPermissionDenied)
}

// managerModule gets certificates from the CA. Caddy asks managers before its
// own cache is filled and does not cache what they return, so two gateways in
// one process never see each other's certificates.
type managerModule struct{ module }

// CaddyModule describes the module.
func (managerModule) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "tls.get_certificate.helix", New: func() caddy.Module { return new(managerModule) }}
}

// GetCertificate implements certmagic.Manager. A client that sends no server
// name gets the gateway's certificate; a foreign name is left to the
// permission module, which turns it down.
func (m *managerModule) GetCertificate(_ context.Context, hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
	name := hello.ServerName
	if name == "" {
		name = GatewayLabel + "." + m.server.cfg.Zones[0]
	}
	if _, ok := ParseName(name, m.server.cfg.Zones); !ok {
		return nil, nil
	}
	return m.server.cfg.CA.Certificate(name)
}

var (
	_ caddyhttp.MiddlewareHandler = (*handlerModule)(nil)
	_ caddytls.OnDemandPermission = (*permissionModule)(nil)
	_ certmagic.Manager           = (*managerModule)(nil)
	_ caddy.CleanerUpper          = (*transportModule)(nil)
	_ caddyfile.Unmarshaler       = (*module)(nil)
)
