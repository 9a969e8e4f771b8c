package gateway

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"helix.local/helix/agent/wire"
	"helix.local/helix/gateway/web"
	"helix.local/helix/tunnel"
	"helix.local/helix/workspaces"
)

// Unreachable reports why a connection to a workspace was not made. Its text
// is one line that a person can act on.
type Unreachable struct {
	Workspace string
	Reason    web.Reason
	Message   string
	Cure      string   // what to do next, "" when nothing is known
	Nearest   string   // for an unknown workspace: a name that looks alike
	Ports     []uint16 // for a refused port: what does listen
	Stage     string   // for one that starts
	Err       error    // what the tunnel said, or nil
}

// Error is the message.
func (u *Unreachable) Error() string { return u.Message }

// Hint is what to do next.
func (u *Unreachable) Hint() string { return u.Cure }

// Unwrap is what the tunnel said.
func (u *Unreachable) Unwrap() error { return u.Err }

// Line is the whole of it in one line, for a client that has no second one.
func (u *Unreachable) Line() string {
	if u.Cure == "" {
		return u.Message
	}
	return u.Message + " (" + u.Cure + ")"
}

// Dial is the router: every way in ends here. It connects to a service or port
// of the workspace's active target; the error is an *Unreachable.
func (g *Gateway) Dial(ctx context.Context, name string, req wire.OpenRequest) (tunnel.Conn, error) {
	ws, err := g.registry.Get(name)
	if err != nil {
		return nil, unknown(name, err)
	}
	target := ws.ActiveTarget()
	inst := g.instanceOf(target.ID)
	if inst == nil || !inst.ready() {
		return nil, notRunning(ws.Name, target)
	}
	conn, err := inst.open(ctx, req)
	if err != nil {
		return nil, g.refusal(ws.Name, inst, req, err)
	}
	return conn, nil
}

func unknown(name string, err error) *Unreachable {
	u := &Unreachable{
		Workspace: name, Reason: web.ReasonUnknownWorkspace, Err: err,
		Message: fmt.Sprintf("there is no workspace %q", name), Cure: "helix ls shows what there is",
	}
	if missing, ok := errors.AsType[*workspaces.NotFoundError](err); ok && missing.Nearest != "" {
		u.Nearest = missing.Nearest
		u.Cure = fmt.Sprintf("did you mean %q?", missing.Nearest)
	}
	return u
}

func notRunning(name string, t workspaces.Target) *Unreachable {
	u := &Unreachable{Workspace: name}
	switch t.State {
	case workspaces.Starting:
		u.Reason, u.Stage = web.ReasonStarting, string(t.Stage)
		u.Message = fmt.Sprintf("workspace %q is starting (%s)", name, t.Stage)
		u.Cure = "try again in a moment"
	case workspaces.Failed:
		u.Reason = web.ReasonFailed
		u.Message = fmt.Sprintf("workspace %q has failed: %s", name, firstLine(t.Reason))
		u.Cure = "helix start " + name
	case workspaces.Running, workspaces.Unknown:
		u.Reason = web.ReasonTunnelDown
		u.Message = fmt.Sprintf("workspace %q runs, but its agent is not connected", name)
		u.Cure = "helix logs " + name
	case workspaces.Stopped, workspaces.Stopping, workspaces.Deleting:
		u.Reason = web.ReasonStopped
		u.Message = fmt.Sprintf("workspace %q is %s", name, t.State)
		u.Cure = "helix start " + name
	}
	return u
}

// firstLine leaves the console out of a reason.
func firstLine(text string) string {
	line, _, _ := strings.Cut(text, "\n")
	return line
}

// refusal tells apart what the tunnel or the agent said.
func (g *Gateway) refusal(name string, inst *instance, req wire.OpenRequest, err error) *Unreachable {
	what := req.Service
	if req.Port != 0 {
		what = "port " + strconv.Itoa(int(req.Port))
	}
	u := &Unreachable{Workspace: name, Reason: web.ReasonTunnelDown, Err: err}
	switch {
	case errors.Is(err, tunnel.ErrRefused), errors.Is(err, tunnel.ErrNoService):
		u.Reason, u.Ports = web.ReasonRefused, inst.portNumbers()
		u.Message = fmt.Sprintf("nothing listens on %s of workspace %q", what, name)
	case errors.Is(err, tunnel.ErrTimeout), errors.Is(err, context.DeadlineExceeded):
		u.Reason = web.ReasonTimeout
		u.Message = fmt.Sprintf("%s of workspace %q did not answer in time", what, name)
	case errors.Is(err, tunnel.ErrDraining):
		u.Message = fmt.Sprintf("workspace %q is going down", name)
	default:
		u.Message = fmt.Sprintf("the tunnel to workspace %q is down: %v", name, err)
		u.Cure = "it is dialled again by itself; helix status " + name
	}
	return u
}

// find tells which workspace a host name belongs to. Host is the bare name of a
// workspace, or a name in one of the zones.
func (g *Gateway) find(host string) (web.Name, bool) {
	if !strings.Contains(host, ".") {
		host += "." + g.zones[0]
	}
	return web.ParseName(host, g.zones)
}
