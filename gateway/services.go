package gateway

import (
	"context"
	"errors"
	"fmt"
	"html/template"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/crypto/ssh"

	"helix.local/helix/agent/wire"
	"helix.local/helix/dnsd"
	"helix.local/helix/gateway/web"
	"helix.local/helix/sshd"
	"helix.local/helix/tunnel"
	"helix.local/helix/workspaces"
)

// openAuthorized opens the list of users' keys. The first time, the default
// keys of the person who runs the gateway go in.
func (g *Gateway) openAuthorized() error {
	path := g.path("ssh", "authorized_keys")
	first := !exists(path)
	g.authorized = sshd.NewAuthorized(path)
	if !first || g.cfg.Home == "" {
		return nil
	}
	offered, err := g.authorized.Offer(g.cfg.Home)
	if err != nil { // such a key is not let in, and that is all
		g.log.Warn("not every default key can be used", "home", g.cfg.Home, "err", err) //nolint:sloglint // no context lives yet
	}
	for _, e := range offered {
		g.log.Info("key may log in", "fingerprint", e.Fingerprint(), "comment", e.Comment) //nolint:sloglint // no context lives yet
	}
	return nil
}

// assemble makes the parts that answer clients, each with the functions it
// needs from the others.
func (g *Gateway) assemble() (err error) {
	g.jump, err = sshd.NewServer(sshd.ServerConfig{
		Host: g.sshHost, Allowed: g.allowed, Client: g.keys.ClientConfig, Zones: g.zones, Log: g.log,
		Dial: func(ctx context.Context, host string, port uint16) (sshd.Conn, error) {
			return g.dialHost(ctx, host, port)
		},
		Relay: func(ctx context.Context, channel, upstream sshd.Conn) error {
			return tunnel.Relay(ctx, channel, upstream)
		},
	})
	if err != nil {
		return err
	}
	g.web, err = web.New(web.Config{
		Zones: g.zones, CA: g.ca, Storage: g.path("certs"), Log: g.log, Grace: g.cfg.Grace,
		Resolve: g.resolve, Dial: g.dialWeb, Gateway: http.HandlerFunc(g.page),
	})
	if err != nil {
		return err
	}
	g.dns, err = dnsd.New(dnsd.Config{
		Zones: g.zones, Log: g.log, Networks: []netip.Prefix{g.cfg.Range}, Reverse: g.reverse,
		Lookup: func(host string) (dnsd.Answer, bool) {
			addr, ok := g.lookup(host)
			return dnsd.Answer{A: addr}, ok
		},
	})
	return err
}

// allowed says who may use the jump host: who may log in to a workspace.
func (g *Gateway) allowed(key ssh.PublicKey) bool {
	return g.keys.IsClient(key) || g.authorized.Allowed(key)
}

// sshHost is the identity that the jump host, or a workspace that cannot be
// reached, answers with.
func (g *Gateway) sshHost(name string) (sshd.Host, error) {
	if name == gatewayLabel {
		return g.keys.Host(gatewayLabel, g.registry.Gateway())
	}
	ws, err := g.registry.Get(name)
	if err != nil {
		return sshd.Host{}, err
	}
	return g.hostOf(ws)
}

// lookup answers DNS questions by the address of the workspace.
func (g *Gateway) lookup(label string) (netip.Addr, bool) {
	if label == gatewayLabel {
		return g.registry.Gateway(), true
	}
	return g.registry.Address(label)
}

// reverse names the workspace that an address belongs to.
func (g *Gateway) reverse(addr netip.Addr) (string, bool) {
	if addr == g.registry.Gateway() {
		return gatewayLabel, true
	}
	name, ok := g.registry.Owner(addr)
	return name, ok
}

// mainPorts are where a workspace's main web service is looked for, in this
// order, when none is declared: HTTP itself, then what development servers use.
var mainPorts = []uint16{80, 8080, 3000, 5173, 8000, 5000, 4200, 8888}

// mainService is the service behind the bare name.
func mainService(ws workspaces.Workspace, listening []uint16) (workspaces.Service, bool) {
	if at := slices.IndexFunc(ws.Services, func(s workspaces.Service) bool { return s.Name == "web" }); at >= 0 {
		return ws.Services[at], true
	}
	for _, p := range mainPorts {
		if slices.Contains(listening, p) {
			return declared(ws, p), true
		}
	}
	for _, p := range listening { // in order
		if p >= 1024 {
			return declared(ws, p), true
		}
	}
	return workspaces.Service{}, false
}

// declared is what is known of a port: its service, or plain HTTP.
func declared(ws workspaces.Workspace, port uint16) workspaces.Service {
	for _, s := range ws.Services {
		if s.Port == port {
			return s
		}
	}
	return workspaces.Service{Port: port, Protocol: workspaces.ProtocolHTTP}
}

// resolve says where a web name leads now.
func (g *Gateway) resolve(name web.Name) (web.Route, error) {
	ws, err := g.registry.Get(name.Workspace)
	if err != nil {
		return web.Route{}, routeError(unknown(name.Workspace, err))
	}
	target := ws.ActiveTarget()
	inst := g.instanceOf(target.ID)
	if inst == nil || !inst.ready() {
		return web.Route{}, routeError(notRunning(ws.Name, target))
	}
	var service workspaces.Service
	var ok bool
	switch {
	case name.Port != 0:
		service, ok = declared(ws, name.Port), true
	case name.Service != "":
		at := slices.IndexFunc(ws.Services, func(s workspaces.Service) bool { return s.Name == name.Service })
		if at < 0 {
			return web.Route{}, &web.RouteError{
				Reason: web.ReasonUnknownService, Workspace: ws.Name, Ports: inst.portNumbers(),
				Message: fmt.Sprintf("Workspace %q has no service %q.", ws.Name, name.Service),
			}
		}
		service, ok = ws.Services[at], true
	default:
		service, ok = mainService(ws, inst.portNumbers())
	}
	if !ok {
		return web.Route{}, &web.RouteError{
			Reason: web.ReasonRefused, Workspace: ws.Name, Message: "No program in it listens on a port yet.",
		}
	}
	return web.Route{
		Workspace: ws.Name, Port: service.Port, Protocol: web.Protocol(service.Protocol),
		Pool: fmt.Sprintf("%s-%d", target.ID, inst.generation),
	}, nil
}

// dialWeb connects Caddy to a port of a workspace.
func (g *Gateway) dialWeb(ctx context.Context, name string, port uint16) (net.Conn, error) {
	conn, err := g.Dial(ctx, name, wire.OpenRequest{Port: port})
	if u, ok := errors.AsType[*Unreachable](err); ok {
		e := routeError(u)
		e.Port = port
		return nil, e
	}
	return conn, err
}

func routeError(u *Unreachable) *web.RouteError {
	e := &web.RouteError{
		Reason: u.Reason, Workspace: u.Workspace, Message: u.Message, Stage: u.Stage,
		Nearest: u.Nearest, Ports: u.Ports, Err: u.Err,
	}
	if u.Cure != "" {
		e.Message += " (" + u.Cure + ")"
	}
	return e
}

// page is what gw.ZONE shows: the workspaces with their state and address.
func (g *Gateway) page(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != "/" {
		http.NotFound(w, r)
		return
	}
	type row struct{ Name, URL, Kind, State string }
	var rows []row
	for _, ws := range g.registry.List() {
		t := ws.ActiveTarget()
		rows = append(rows, row{ws.Name, g.url(ws.Name, ""), string(t.Kind), string(t.State)})
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	if err := statusPage.Execute(w, rows); err != nil {
		g.log.DebugContext(r.Context(), "status page", "err", err)
	}
}

var statusPage = template.Must(template.New("page").Parse(`<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Helix</title>
<style>body{font:16px/1.5 system-ui,sans-serif;max-width:42em;margin:3em auto;padding:0 1em}td,th{text-align:left;padding:.2em 1.5em .2em 0}</style>
<h1>Workspaces</h1>
{{if .}}<table><tr><th>Name<th>Kind<th>State</tr>
{{range .}}<tr><td><a href="{{.URL}}">{{.Name}}</a><td>{{.Kind}}<td>{{.State}}</tr>
{{end}}</table>{{else}}<p>There is none yet: <code>helix create NAME --image tiny</code></p>{{end}}
`))

// streamTimeout bounds the way from an accepted connection to its upstream.
const streamTimeout = 15 * time.Second
