package gateway

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"helix.local/helix/agent/wire"
	"helix.local/helix/gateway/api"
	"helix.local/helix/gateway/web"
	"helix.local/helix/tunnel"
)

// serveConns accepts from l until ctx is done and runs serve for each
// connection. Those that are open then get the grace time before their own ctx
// ends. It closes l, and returns when all have ended; serve closes its connection.
func serveConns(ctx context.Context, l net.Listener, grace time.Duration, serve func(context.Context, net.Conn)) error {
	serving, cut := context.WithCancel(context.WithoutCancel(ctx))
	defer cut()
	stop := context.AfterFunc(ctx, func() { _ = l.Close() }) // Accept says so
	defer stop()
	var conns sync.WaitGroup
	for {
		c, err := l.Accept()
		if ctx.Err() != nil {
			if err == nil {
				_ = c.Close() // came too late
			}
			late := time.AfterFunc(grace, cut)
			defer late.Stop()
			conns.Wait()
			return nil
		}
		if err != nil {
			cut()
			conns.Wait()
			return fmt.Errorf("accept at %s: %w", l.Addr(), errors.Join(err, ignoreClosed(l.Close())))
		}
		conns.Go(func() { serve(serving, c) })
	}
}

// serveLink makes a session of what a guest dialled through its shim. The
// session outlives the listener: clients need it for their grace time.
func (g *Gateway) serveLink(_ context.Context, conn net.Conn) {
	if !g.spawn(func(ctx context.Context) {
		if err := g.admit(ctx, conn, wire.LinkTCP); err != nil {
			g.log.DebugContext(ctx, "fast link ended", "err", err)
		}
	}) {
		_ = conn.Close() // the gateway is down
	}
}

// serveProxy connects one client of the proxy socket to the workspace it asks for.
func (g *Gateway) serveProxy(ctx context.Context, conn net.Conn) {
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() }) // the frame may never come
	defer stop()
	var req api.ProxyRequest
	if err := wire.ReadFrame(conn, &req); err != nil {
		g.log.DebugContext(ctx, "proxy request", "err", err)
		return
	}
	upstream, err := g.dialHost(ctx, req.Host, req.Port)
	if u, ok := errors.AsType[*Unreachable](err); ok && req.Port == sshPort && u.Reason != web.ReasonUnknownWorkspace {
		// The client speaks SSH: say the reason in its own words.
		if wire.WriteFrame(conn, wire.OpenReply{Status: wire.StatusOK}) == nil {
			g.unavailable(ctx, conn, u)
		}
		return
	}
	if err != nil {
		_ = wire.WriteFrame(conn, wire.OpenReply{Status: wire.StatusFailed, Message: oneLine(err)}) // it may have left
		return
	}
	defer upstream.Close()
	if err := wire.WriteFrame(conn, wire.OpenReply{Status: wire.StatusOK}); err != nil {
		return
	}
	if err := tunnel.Relay(ctx, conn.(*net.UnixConn), upstream); err != nil {
		g.log.DebugContext(ctx, "proxied connection ended", "err", err)
	}
}

func oneLine(err error) string {
	if u, ok := errors.AsType[*Unreachable](err); ok {
		return u.Line()
	}
	return err.Error()
}

// The port that is SSH on every workspace, whatever listens on it inside.
const sshPort = 22

// dialHost connects to a port of the workspace, or of the gateway itself, that
// host names.
func (g *Gateway) dialHost(ctx context.Context, host string, port uint16) (tunnel.Conn, error) {
	name, ok := g.find(host)
	if !ok {
		return nil, unknown(host, nil)
	}
	if name.Gateway() {
		return g.dialSelf(ctx, port)
	}
	if port == sshPort {
		return g.Dial(ctx, name.Workspace, wire.OpenRequest{Service: wire.ServiceSSH})
	}
	return g.Dial(ctx, name.Workspace, wire.OpenRequest{Port: port})
}

// dialSelf connects to the jump host, which may listen on another port than 22.
func (g *Gateway) dialSelf(ctx context.Context, port uint16) (tunnel.Conn, error) {
	if port != sshPort {
		return nil, &Unreachable{
			Workspace: gatewayLabel, Reason: web.ReasonRefused,
			Message: fmt.Sprintf("the gateway itself has no port %d here", port),
		}
	}
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", g.info().SSH)
	if err != nil {
		return nil, fmt.Errorf("connect to the jump host: %w", err)
	}
	return conn.(*net.TCPConn), nil
}

// unavailable answers an SSH client in the workspace's name and says why there
// is no more. It closes conn.
func (g *Gateway) unavailable(ctx context.Context, conn net.Conn, u *Unreachable) {
	if err := g.jump.ServeUnavailable(ctx, conn, u.Workspace, u.Line()); err != nil {
		g.log.DebugContext(ctx, "answer of an unreachable workspace", "workspace", u.Workspace, "err", err)
	}
}
