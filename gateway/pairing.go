package gateway

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"time"

	"helix.local/helix/agent/wire"
	"helix.local/helix/tunnel"
	"helix.local/helix/workspaces"
)

// tokenLife is how long a bootstrap secret is good for. It outlives the
// slowest start (emulated, on a busy machine) and little more.
const tokenLife = 15 * time.Minute

// newToken makes a bootstrap secret of 256 bits.
func newToken() wire.Secret {
	var secret [32]byte
	_, _ = rand.Read(secret[:]) // never fails
	return wire.Secret(base64.RawURLEncoding.EncodeToString(secret[:]))
}

// offer decides who may have a session. An agent with a token is paired: the
// key it shows becomes the credential of its target, and the token is spent. An
// agent without one must own the credential; the tunnel has checked that it
// owns the key it shows.
func (g *Gateway) offer(ctx context.Context, _ wire.Hello, in wire.Introduction) (wire.Welcome, error) {
	inst := g.instanceOf(in.Target)
	refuse := func(why wire.Refusal, err error) (wire.Welcome, error) {
		// Whoever is refused may come again at once and for ever: only the
		// first of a kind is worth a line and an event.
		if inst != nil && inst.firstRefusal(why) {
			g.log.WarnContext(ctx, "agent refused", "workspace", inst.workspace, "reason", string(why), "err", err)
			g.note(ctx, workspaces.Event{Kind: EventRefused, Workspace: inst.workspace, Target: inst.target, Reason: err.Error()})
		}
		return wire.Welcome{}, &tunnel.RefusedError{Reason: why, Message: err.Error()}
	}
	if inst == nil {
		return refuse(wire.RefusedTarget, errors.New("no such target runs"))
	}
	if in.Generation != inst.generation {
		return refuse(wire.RefusedGeneration, fmt.Errorf("it is of start %d, not %d", in.Generation, inst.generation))
	}
	if in.Token != "" {
		_, err := g.registry.Pair(workspaces.Pairing{
			TargetID: in.Target, Generation: in.Generation, Token: string(in.Token), PublicKey: in.PublicKey,
		})
		switch {
		case errors.Is(err, workspaces.ErrTokenExpired):
			return refuse(wire.RefusedExpired, err)
		case errors.Is(err, workspaces.ErrTokenUsed), errors.Is(err, workspaces.ErrTokenWrong):
			return refuse(wire.RefusedToken, err)
		case errors.Is(err, workspaces.ErrStaleGeneration):
			return refuse(wire.RefusedGeneration, err)
		case err != nil:
			return refuse(wire.RefusedInternal, err)
		}
	} else {
		_, target, err := g.registry.TargetByID(in.Target)
		if err != nil {
			return refuse(wire.RefusedTarget, err)
		}
		if len(target.Credential) == 0 || !bytes.Equal(target.Credential, in.PublicKey) {
			return refuse(wire.RefusedCredential, errors.New("it shows a key that is not the credential"))
		}
	}
	if err := g.registry.Seen(in.Target); err != nil {
		g.log.WarnContext(ctx, "last seen not recorded", "target", in.Target, "err", err)
	}
	return wire.Welcome{Session: newSessionID(), Epoch: inst.nextEpoch(), Time: time.Now()}, nil
}

func newSessionID() string {
	var id [8]byte
	_, _ = rand.Read(id[:]) // never fails
	return base64.RawURLEncoding.EncodeToString(id[:])
}

// admit makes a session of a link of the given kind and serves it until it
// ends. It closes conn.
func (g *Gateway) admit(ctx context.Context, conn net.Conn, link string) error {
	session, err := tunnel.Accept(ctx, conn, tunnel.GatewayConfig{Key: g.key, Offer: g.offer, Log: g.log})
	if err != nil {
		return errors.Join(err, ignoreClosed(conn.Close()))
	}
	if said := session.Intro().Link; said != link {
		return errors.Join(fmt.Errorf("the agent says %q of a %s link", said, link), session.Close())
	}
	inst := g.instanceOf(session.Intro().Target)
	if inst == nil || inst.generation != session.Intro().Generation {
		return errors.Join(errors.New("the target ended during the handshake"), session.Close())
	}
	inst.serve(ctx, session)
	return session.Err()
}

func ignoreClosed(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}
