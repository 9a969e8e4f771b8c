package gateway

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"time"

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
	inst.identity.Lock() // across the call: what was read last is told last
	defer inst.identity.Unlock()
	ws, err := g.registry.Get(inst.workspace)
	if err != nil {
		return err
	}
	host, err := g.hostOf(ws)
	if err != nil {
		return fmt.Errorf("identity of %q: %w", ws.Name, err)
	}
	return inst.call(ctx, http.MethodPut, wire.PathIdentity, wire.Identity{
		HostKey: wire.Secret(host.PrivatePEM()), HostCert: host.CertLine(),
		Authorized: g.authorizedLines(ctx), Hostname: g.hostname(ws.Name),
	}, nil)
}

// authorizedLines are the keys that may log in: the users' and the command
// line's own. A line that cannot be read costs only itself.
func (g *Gateway) authorizedLines(ctx context.Context) []string {
	entries, err := g.authorized.List()
	if err != nil {
		g.log.WarnContext(ctx, "not every key can be read", "err", err)
	}
	lines := []string{g.keys.ClientLine()}
	for _, e := range entries {
		lines = append(lines, e.Line())
	}
	return lines
}

// identityTime bounds the telling of one agent.
const identityTime = 5 * time.Second

// keepIdentity tells the agent its identity again when a link has come back, or
// when it could not be told of changed keys, until ctx ends.
func (g *Gateway) keepIdentity(ctx context.Context, inst *instance) {
	for {
		select {
		case <-inst.stale:
		case <-ctx.Done():
			return
		}
		if !inst.ready() {
			continue // the start tells it
		}
		telling, cancel := context.WithTimeout(ctx, identityTime)
		err := g.identify(telling, inst)
		cancel()
		if err != nil {
			inst.log.DebugContext(ctx, "identity not told yet", "err", err)
			pause(ctx, time.Second)
			inst.outdate()
		}
	}
}

// identifyAll tells every live agent after the keys have changed, all at once,
// and returns the workspaces that could not be told. They are told later.
func (g *Gateway) identifyAll(ctx context.Context) (late []string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), identityTime)
	defer cancel()
	var mu sync.Mutex // guards late
	var telling sync.WaitGroup
	g.instances.Range(func(_, value any) bool {
		inst := value.(*instance)
		telling.Go(func() {
			if err := g.identify(ctx, inst); err != nil {
				inst.log.WarnContext(ctx, "agent not told of changed keys", "err", err)
				inst.outdate()
				mu.Lock()
				defer mu.Unlock()
				late = append(late, inst.workspace)
			}
		})
		return true
	})
	telling.Wait()
	return late
}

func (g *Gateway) hostname(name string) string { return name + "." + g.zones[0] }
