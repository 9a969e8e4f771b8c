package gateway

import (
	"context"
	"fmt"
	"net/http"

	"helix.local/helix/agent/wire"
	"helix.local/helix/sshd"
	"helix.local/helix/workspaces"
)

// hostOf is the SSH identity of a workspace. It belongs to the name, so that
// it outlives rebuilds and switches.
func (g *Gateway) hostOf(ws workspaces.Workspace) (sshd.Host, error) {
	return g.keys.Host(ws.Name, ws.Address)
}

// identify gives the agent what its SSH server presents and accepts.
func (g *Gateway) identify(ctx context.Context, inst *instance) error {
	ws, err := g.registry.Get(inst.workspace)
	if err != nil {
		return err
	}
	host, err := g.hostOf(ws)
	if err != nil {
		return fmt.Errorf("identity of %q: %w", ws.Name, err)
	}
	lines, err := g.authorizedLines()
	if err != nil {
		return fmt.Errorf("identity of %q: %w", ws.Name, err)
	}
	return inst.call(ctx, http.MethodPut, wire.PathIdentity, wire.Identity{
		HostKey: wire.Secret(host.PrivatePEM()), HostCert: host.CertLine(),
		Authorized: lines, Hostname: g.hostname(ws.Name),
	}, nil)
}

// authorizedLines are the keys that may log in: the users' and the command line's own.
func (g *Gateway) authorizedLines() ([]string, error) {
	entries, err := g.authorized.List()
	if err != nil {
		return nil, err
	}
	lines := []string{g.keys.ClientLine()}
	for _, e := range entries {
		lines = append(lines, e.Line())
	}
	return lines, nil
}

// identifyAll tells every live agent after the keys have changed. An agent
// that cannot be told learns it when it connects again.
func (g *Gateway) identifyAll(ctx context.Context) {
	g.instances.Range(func(_, value any) bool {
		inst := value.(*instance)
		if err := g.identify(ctx, inst); err != nil {
			inst.log.WarnContext(ctx, "agent not told of changed keys", "err", err)
		}
		return true
	})
}

func (g *Gateway) hostname(name string) string { return name + "." + g.zones[0] }
