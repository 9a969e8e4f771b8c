package agent

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	mathrand "math/rand/v2"
	"net"
	"sync/atomic"
	"time"

	"helix.local/helix/agent/wire"
	"helix.local/helix/tunnel"
)

// The pauses before a link is tried again: full jitter up to a ceiling that
// doubles, so that many agents do not come back in step.
const (
	firstPause   = 50 * time.Millisecond
	longestPause = 5 * time.Second
	// A gateway that has turned us down rarely changes its mind.
	refusedPause = 30 * time.Second
)

// keeper makes sessions of links, one at a time on each.
type keeper struct {
	boot      wire.Boot
	version   string
	key       ed25519.PrivateKey
	handle    tunnel.Handler
	onSession func(*tunnel.Session) // called when one starts; nil is allowed
	log       *slog.Logger

	// pairing is held across a handshake until one has succeeded: the token is
	// good for one, and two links must not present it at once.
	pairing chan struct{}
	paired  atomic.Bool
	// keyOnly says that the token may be spent although nobody told us: then
	// the key alone is tried. Guarded by pairing.
	keyOnly bool
}

func newKeeper(boot wire.Boot, version string, handle tunnel.Handler, log *slog.Logger) (*keeper, error) {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make the target's key: %w", err)
	}
	return &keeper{boot: boot, version: version, key: key, handle: handle, log: log, pairing: make(chan struct{}, 1)}, nil
}

// run makes one session over conn and serves it to its end, which it returns;
// established tells whether there was one. It closes conn.
func (k *keeper) run(ctx context.Context, conn net.Conn, link string) (established bool, err error) {
	s, err := k.connect(ctx, conn, link)
	if err != nil {
		return false, errors.Join(err, ignoreClosed(conn.Close()))
	}
	defer func() { _ = s.Close() }() // it has ended
	k.log.InfoContext(ctx, "session started", "session", s.Name(), "link", link)
	if k.onSession != nil {
		k.onSession(s)
	}
	if err := s.Serve(ctx, k.handle); err != nil {
		return true, fmt.Errorf("serve session on %s: %w", link, err)
	}
	return true, nil
}

func (k *keeper) connect(ctx context.Context, conn net.Conn, link string) (*tunnel.Session, error) {
	if !k.paired.Load() {
		select {
		case k.pairing <- struct{}{}:
			defer func() { <-k.pairing }()
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for pairing: %w", ctx.Err())
		}
	}
	var token wire.Secret
	if !k.paired.Load() && !k.keyOnly {
		token = k.boot.Token
	}
	said := &counting{Conn: conn}
	s, err := tunnel.Connect(ctx, said, tunnel.AgentConfig{
		Target: k.boot.Target, Generation: k.boot.Generation, Version: k.version, Link: link,
		Key: k.key, Token: token, GatewayKey: k.boot.GatewayKey, Log: k.log,
	})
	if err == nil {
		k.paired.Store(true)
		return s, nil
	}
	if !k.paired.Load() {
		k.judge(err, said.written.Load())
	}
	return nil, err //nolint:wrapcheck // says what failed
}

// judge decides what to show next time after a handshake that failed. Caller
// holds pairing.
func (k *keeper) judge(err error, introduced bool) {
	refused, isRefusal := errors.AsType[*tunnel.RefusedError](err)
	switch {
	case isRefusal && refused.Reason == wire.RefusedToken:
		k.keyOnly = true // perhaps spent by us, in a handshake whose end we did not hear
	case isRefusal && refused.Reason == wire.RefusedCredential:
		k.keyOnly = false
	case !isRefusal && introduced && !k.keyOnly:
		k.keyOnly = true
	}
}

// counting notes whether anything was written.
type counting struct {
	net.Conn
	written atomic.Bool
}

func (c *counting) Write(p []byte) (int, error) {
	c.written.Store(true)
	return c.Conn.Write(p) //nolint:wrapcheck // transparent
}

// keep makes sessions over what dial returns until ctx is done. dial may wait
// as long as it likes.
func (k *keeper) keep(ctx context.Context, link string, dial func(context.Context) (net.Conn, error)) {
	pause := backoff{}
	for ctx.Err() == nil {
		established := false
		conn, err := dial(ctx)
		if err == nil {
			established, err = k.run(ctx, conn, link)
		}
		if ctx.Err() != nil {
			return
		}
		if established {
			pause = backoff{}
		}
		wait := pause.next()
		if refused, ok := errors.AsType[*tunnel.RefusedError](err); ok {
			k.log.WarnContext(ctx, "session refused", "link", link, "err", err)
			if refused.Reason != wire.RefusedToken && refused.Reason != wire.RefusedCredential {
				wait = refusedPause
			}
		} else {
			k.log.DebugContext(ctx, "link down", "link", link, "err", err, "pause", wait)
		}
		sleep(ctx, wait)
	}
}

// backoff is the sequence of pauses after failures; the zero value begins it.
type backoff struct{ ceiling time.Duration }

func (b *backoff) next() time.Duration {
	b.ceiling = min(max(2*b.ceiling, firstPause), longestPause)
	return mathrand.N(b.ceiling) //nolint:gosec // spreads load, keeps no secret
}

func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

func ignoreClosed(err error) error {
	if errors.Is(err, net.ErrClosed) || errors.Is(err, io.ErrClosedPipe) {
		return nil
	}
	return err
}
