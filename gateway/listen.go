package gateway

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sync/errgroup"

	"helix.local/helix/agent/wire"
	"helix.local/helix/gateway/api"
	"helix.local/helix/gateway/front"
	"helix.local/helix/gateway/web"
	"helix.local/helix/tunnel"
	"helix.local/helix/workspaces"
)

// highOffset is added to a standard port that cannot be had.
const highOffset = 10000

// listened is where the gateway and its workspaces are reached. The ports are
// decided once, on the gateway's own address, and are the same on every other.
type listened struct {
	dns, ssh  netip.AddrPort
	sshPort   uint16
	httpPort  uint16
	httpsPort uint16
	ports     map[string]map[netip.AddrPort]bool // what is open for each workspace
	lost      map[front.Role]bool                // roles that somebody was told about
	taken     map[netip.AddrPort]bool            // ports of machines that somebody was told about
	announced map[string]string                  // last ports event of each workspace
}

// listenAll binds everything and hands each serving loop to parts.
func (g *Gateway) listenAll(ctx context.Context, parts *errgroup.Group) error {
	g.listened.ports, g.listened.lost, g.listened.announced = map[string]map[netip.AddrPort]bool{}, map[front.Role]bool{}, map[string]string{}
	g.listened.taken = map[netip.AddrPort]bool{}
	g.front = front.New(front.Config{Handle: g.serveConn, Grace: g.cfg.Grace, Log: g.log})
	g.sni = front.NewSNI(front.SNIConfig{
		Passthrough: g.passthrough, Log: g.log,
		Relay: func(ctx context.Context, client, service front.Conn) error { return tunnel.Relay(ctx, client, service) },
		Terminate: func(ctx context.Context, c front.Conn) {
			if err := g.web.ServeTLS(ctx, c); err != nil {
				g.log.DebugContext(ctx, "TLS connection not served", "err", err)
			}
		},
	})
	if err := g.listenDNS(ctx, parts); err != nil {
		return err
	}
	for _, l := range []struct {
		port uint16
		role front.Role
		got  *uint16
		lost string
	}{
		{22, front.RoleSSH, &g.listened.sshPort, "plain `ssh NAME.%s` without the generated configuration needs -p %d"},
		{80, front.RoleHTTP, &g.listened.httpPort, "http://NAME.%s needs :%d"},
		{443, front.RoleHTTPS, &g.listened.httpsPort, "https://NAME.%s needs :%d"},
	} {
		if err := g.listenFixed(ctx, l.port, l.role, l.got, l.lost); err != nil {
			return err
		}
	}
	g.listened.ssh = netip.AddrPortFrom(g.registry.Gateway(), g.listened.sshPort)
	return g.listenSockets(ctx, parts)
}

// choose is the port to try for a standard one, and the one to fall back to (0 for none).
func (g *Gateway) choose(port uint16) (want, fallback uint16) {
	switch g.cfg.Ports {
	case PortsHigh:
		return port + highOffset, 0
	case PortsPrivileged:
		return port, 0
	case PortsAuto:
	}
	return port, port + highOffset
}

// listenFixed opens one of the standard ports on the gateway's own address.
func (g *Gateway) listenFixed(ctx context.Context, port uint16, role front.Role, got *uint16, lost string) error {
	want, fallback := g.choose(port)
	res, err := g.front.Open(ctx, netip.AddrPortFrom(g.registry.Gateway(), want), role, fallback)
	if err != nil {
		return err
	}
	*got = res.Got.Port()
	if res.Fallback() {
		g.warn(ctx, api.Warning{
			Message: fmt.Sprintf("%s; %s", res, fmt.Sprintf(lost, g.zones[0], *got)), Hint: fallbackHint(res.Why),
		})
	}
	return nil
}

func fallbackHint(why error) string {
	return (&front.BindError{Err: why}).Hint()
}

// listenDNS binds UDP and TCP on one port.
func (g *Gateway) listenDNS(ctx context.Context, parts *errgroup.Group) error {
	want, fallback := g.choose(53)
	udp, tcp, err := g.bindDNS(ctx, want)
	if err != nil && fallback != 0 {
		var second error
		if udp, tcp, second = g.bindDNS(ctx, fallback); second != nil {
			return errors.Join(err, second)
		}
		g.warn(ctx, api.Warning{
			Message: fmt.Sprintf("%v; names are answered on port %d", err, fallback),
			Hint:    fmt.Sprintf("dig @%s -p %d NAME.%s; %s", g.registry.Gateway(), fallback, g.zones[0], hintOf(err)),
		})
	} else if err != nil {
		return err
	}
	g.listened.dns = udp.LocalAddr().(*net.UDPAddr).AddrPort()
	parts.Go(func() error { return g.dns.Serve(ctx, udp, tcp) })
	return nil
}

func (g *Gateway) bindDNS(ctx context.Context, port uint16) (*net.UDPConn, *net.TCPListener, error) {
	addr := netip.AddrPortFrom(g.registry.Gateway(), port)
	udp, _, err := front.BindPacket(ctx, addr, 0)
	if err != nil {
		return nil, nil, err
	}
	tcp, _, err := front.Bind(ctx, addr, 0)
	if err != nil {
		return nil, nil, errors.Join(err, udp.Close())
	}
	return udp, tcp, nil
}

// listenSockets opens the unix sockets and starts all serving loops.
func (g *Gateway) listenSockets(ctx context.Context, parts *errgroup.Group) error {
	var sockets []net.Listener
	for _, name := range []string{"api.sock", "proxy.sock", "links.sock"} {
		l, err := listenPrivate(g.path(name))
		if err != nil {
			for _, open := range sockets {
				err = errors.Join(err, open.Close())
			}
			return err
		}
		sockets = append(sockets, l)
	}
	parts.Go(func() error { return g.serveAPI(ctx, sockets[0]) })
	parts.Go(func() error { return serveConns(ctx, sockets[1], g.cfg.Grace, g.serveProxy) })
	parts.Go(func() error { return serveConns(ctx, sockets[2], 0, g.serveLink) })
	parts.Go(func() error { return g.web.Run(ctx) })
	parts.Go(func() error { return g.sni.Run(ctx) })
	parts.Go(func() error { return g.front.Run(ctx) })
	select {
	case <-g.web.Ready():
	case <-ctx.Done():
	}
	return nil
}

func (g *Gateway) serveAPI(ctx context.Context, l net.Listener) error {
	srv := &http.Server{
		Handler:           api.Handler(backend{g}, g.log),
		BaseContext:       func(net.Listener) context.Context { return ctx }, // watches end with the gateway
		ReadHeaderTimeout: streamTimeout,
	}
	stopped := make(chan error, 1) // the one result of Shutdown
	stop := context.AfterFunc(ctx, func() {
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), g.cfg.Grace)
		defer cancel()
		err := srv.Shutdown(grace)
		if errors.Is(err, context.DeadlineExceeded) { // a watcher that does not read
			err = srv.Close()
		}
		stopped <- err
	})
	err := srv.Serve(l)
	if stop() { // it ended by itself
		return fmt.Errorf("serve the API: %w", err)
	}
	return <-stopped
}

// serveConn is where every accepted TCP connection begins. It owns c.
func (g *Gateway) serveConn(ctx context.Context, c *net.TCPConn, local front.Local) {
	switch local.Role {
	case front.RoleHTTP:
		if err := g.web.ServePlain(ctx, c); err != nil {
			g.log.DebugContext(ctx, "HTTP connection not served", "err", err)
		}
		return
	case front.RoleHTTPS:
		g.sni.Handle(ctx, c)
		return
	case front.RoleSSH, front.RolePort:
	}
	if local.Wanted.Addr() == g.registry.Gateway() {
		if err := g.jump.ServeConn(ctx, c); err != nil {
			g.log.DebugContext(ctx, "jump host connection ended", "err", err)
		}
		return
	}
	name, ok := g.registry.Owner(local.Wanted.Addr())
	if !ok {
		_ = front.Reset(c) // the workspace was removed in this moment
		return
	}
	req := wire.OpenRequest{Port: local.Wanted.Port()}
	if local.Role == front.RoleSSH {
		req = wire.OpenRequest{Service: wire.ServiceSSH}
	}
	g.connect(ctx, c, name, req)
}

// connect joins an accepted connection to its upstream. Where there is none,
// an SSH client is told why, and any other is refused in TCP's own way: the
// kernel has accepted already, so a reset is the nearest to it.
func (g *Gateway) connect(ctx context.Context, c *net.TCPConn, name string, req wire.OpenRequest) {
	dialing, cancel := context.WithTimeout(ctx, streamTimeout)
	upstream, err := g.Dial(dialing, name, req)
	cancel()
	if err != nil {
		g.log.DebugContext(ctx, "connection not made", "workspace", name, "err", err)
		if u, ok := errors.AsType[*Unreachable](err); ok && req.Service == wire.ServiceSSH {
			g.unavailable(ctx, c, u)
			return
		}
		_ = front.Reset(c) // it may be gone already
		return
	}
	client := tunnel.Conn(c)
	if req.Service == wire.ServiceSSH {
		client = front.Prompt(c)
	}
	if err := tunnel.Relay(ctx, client, upstream); err != nil {
		g.log.DebugContext(ctx, "connection ended", "workspace", name, "err", err)
	}
}

// passthrough finds the service that terminates TLS for a name itself.
func (g *Gateway) passthrough(serverName string) (front.Dial, bool) {
	name, ok := web.ParseName(serverName, g.zones)
	if !ok || name.Gateway() {
		return nil, false
	}
	route, err := g.resolve(name)
	if err != nil || route.Protocol != web.ProtocolTLS {
		return nil, false
	}
	return func(ctx context.Context) (front.Conn, error) {
		return g.Dial(ctx, route.Workspace, wire.OpenRequest{Port: route.Port})
	}, true
}

// maxPorts is how many ports of one workspace get a listener: a guest decides
// what it listens on, and must not use up this process's descriptors.
const maxPorts = 256

// relisten brings the listeners of a workspace in line with what it listens on.
func (g *Gateway) relisten(ctx context.Context, name string) {
	g.mu.Lock() // before looking, so that what was seen last is done last
	defer g.mu.Unlock()
	ws, err := g.registry.Get(name)
	if err != nil || ws.ActiveTarget().State == workspaces.Deleting {
		return // unlisten has closed them, or will
	}
	var numbers []uint16
	if inst := g.instanceOf(ws.ActiveTarget().ID); inst != nil && inst.ready() {
		numbers = inst.portNumbers()
	}
	if len(numbers) > maxPorts {
		numbers = numbers[:maxPorts]
		g.log.WarnContext(ctx, "too many ports", "workspace", name, "opened", maxPorts)
	}
	want := map[netip.AddrPort]front.Role{
		netip.AddrPortFrom(ws.Address, g.listened.sshPort):   front.RoleSSH,
		netip.AddrPortFrom(ws.Address, g.listened.httpPort):  front.RoleHTTP,
		netip.AddrPortFrom(ws.Address, g.listened.httpsPort): front.RoleHTTPS,
	}
	for _, port := range numbers {
		at := netip.AddrPortFrom(ws.Address, port)
		if _, taken := want[at]; !taken && port != sshPort {
			want[at] = front.RolePort
		}
	}
	open := g.listened.ports[name]
	if open == nil {
		open = map[netip.AddrPort]bool{}
		g.listened.ports[name] = open
	}
	for at := range open {
		if _, still := want[at]; !still {
			delete(open, at)
			g.closeLocked(ctx, at)
		}
	}
	for at, role := range want {
		if !open[at] && g.openLocked(ctx, name, ws.ActiveTarget().Kind, at, role) {
			open[at] = true
		}
	}
	g.announceLocked(ctx, ws, numbers)
}

// openLocked opens one listener of a workspace; mu is held.
func (g *Gateway) openLocked(ctx context.Context, name string, kind workspaces.Kind, at netip.AddrPort, role front.Role) bool {
	_, err := g.front.Open(ctx, at, role, 0)
	switch {
	case err == nil:
		return true
	case role == front.RolePort && kind == workspaces.KindVM:
		if !g.listened.taken[at] { // once for each port
			g.listened.taken[at] = true
			g.warnLocked(ctx, api.Warning{
				Message: fmt.Sprintf("port %d of workspace %q cannot be reached by its address: %v", at.Port(), name, err),
				Hint:    fmt.Sprintf("use %s, or let the other program listen on 127.0.0.1 only", g.url(name, strconv.Itoa(int(at.Port())))),
			})
		}
	case role == front.RolePort:
		// A program of a directory target that listens on every address has
		// this one too: then its connections need no help.
		g.log.DebugContext(ctx, "port not opened", "workspace", name, "err", err)
	case !g.listened.lost[role]:
		g.listened.lost[role] = true
		g.warnLocked(ctx, api.Warning{Message: fmt.Sprintf("%s of workspace %q: %v", role, name, err), Hint: hintOf(err)})
	}
	return false
}

// closeLocked closes one listener; what it accepted lives on. mu is held.
func (g *Gateway) closeLocked(ctx context.Context, at netip.AddrPort) {
	if err := g.front.Close(at, front.KeepConns); err != nil {
		g.log.DebugContext(ctx, "listener not closed", "address", at.String(), "err", err)
	}
}

// announceLocked tells the watchers when the ports are others than they were
// told; mu is held.
func (g *Gateway) announceLocked(ctx context.Context, ws workspaces.Workspace, numbers []uint16) {
	text := strings.Trim(strings.Join(strings.Fields(fmt.Sprint(numbers)), ", "), "[]")
	if g.listened.announced[ws.Name] == text {
		return
	}
	g.listened.announced[ws.Name] = text
	g.note(ctx, workspaces.Event{Kind: EventPorts, Workspace: ws.Name, ID: ws.ID, Target: ws.Active, Reason: text})
}

// unlisten closes everything of a workspace that goes away, with what it accepted.
func (g *Gateway) unlisten(ctx context.Context, name string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for at := range g.listened.ports[name] {
		if err := g.front.Close(at, front.ResetConns); err != nil {
			g.log.DebugContext(ctx, "listener not closed", "address", at.String(), "err", err)
		}
	}
	delete(g.listened.ports, name)
	delete(g.listened.announced, name)
}

// info describes this gateway.
func (g *Gateway) info() api.Info {
	g.mu.Lock()
	defer g.mu.Unlock()
	return api.Info{
		Version: g.cfg.Version, PID: os.Getpid(), State: g.cfg.State, Zone: g.zones[0], Zones: g.zones, Started: g.started,
		Address: g.registry.Gateway().String(), DNS: g.listened.dns.String(), SSH: g.listened.ssh.String(),
		SSHPort: g.listened.sshPort, HTTP: g.listened.httpPort, HTTPS: g.listened.httpsPort,
		Root: g.path("ca", "root.crt"), Warnings: slices.Clone(g.warnings),
	}
}
