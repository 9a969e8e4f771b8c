package tunnel

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"time"

	"helix.local/helix/agent/wire"
)

const nonceSize = 32

// terms is what the two ends agreed on before the first stream.
type terms struct {
	hello   wire.Hello
	intro   wire.Introduction // without its token
	welcome wire.Welcome
	at      time.Time // when the welcome was sent or received
}

// Accept makes the gateway's end of a session on conn, which it owns from then
// on: when Accept fails, conn is closed. ctx bounds the handshake only; the
// session lives until Close, or until the peer or the link ends it.
func Accept(ctx context.Context, conn net.Conn, cfg GatewayConfig) (*Session, error) {
	if err := cfg.Limits.Validate(); err != nil {
		return nil, errors.Join(fmt.Errorf("accept session: %w", err), conn.Close())
	}
	if len(cfg.Key) != ed25519.PrivateKeySize || cfg.Offer == nil {
		return nil, errors.Join(errors.New("accept session: key and offer are required"), conn.Close())
	}
	limits := cfg.Limits.withDefaults()
	var s *Session
	err := bounded(ctx, conn, limits.Handshake, func(ctx context.Context) error {
		t, err := acceptHandshake(ctx, conn, cfg)
		if err != nil {
			return err
		}
		s, err = newSession(conn, gatewaySide, t, limits, logger(cfg.Log))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("accept session: %w", err)
	}
	return s, nil
}

// Connect makes the agent's end of a session on conn, which it owns from then
// on: when Connect fails, conn is closed. ctx bounds the handshake only. Serve
// must be called to answer the gateway's streams.
func Connect(ctx context.Context, conn net.Conn, cfg AgentConfig) (*Session, error) {
	if err := cfg.Limits.Validate(); err != nil {
		return nil, errors.Join(fmt.Errorf("connect session: %w", err), conn.Close())
	}
	if len(cfg.Key) != ed25519.PrivateKeySize {
		return nil, errors.Join(errors.New("connect session: key is required"), conn.Close())
	}
	limits := cfg.Limits.withDefaults()
	var s *Session
	err := bounded(ctx, conn, limits.Handshake, func(context.Context) error {
		t, err := connectHandshake(conn, cfg)
		if err != nil {
			return err
		}
		s, err = newSession(conn, agentSide, t, limits, logger(cfg.Log))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("connect session: %w", err)
	}
	return s, nil
}

// bounded runs f and closes conn when ctx or the time ends it, which works on
// links without deadlines too, and whenever f fails.
func bounded(ctx context.Context, conn net.Conn, limit time.Duration, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() }) // ctx's error is the one reported
	err := f(ctx)
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err == nil {
		return nil
	}
	_ = conn.Close() // err says more
	if cause := context.Cause(ctx); cause != nil && !errors.Is(err, cause) {
		err = fmt.Errorf("%w: %w", cause, err)
	}
	return err
}

func acceptHandshake(ctx context.Context, conn net.Conn, cfg GatewayConfig) (terms, error) {
	clock := cfg.Clock
	if clock == nil {
		clock = time.Now
	}
	nonce, err := newNonce()
	if err != nil {
		return terms{}, err
	}
	t := terms{hello: wire.Hello{Version: wire.Version, MinVersion: wire.MinVersion, Nonce: nonce, Time: clock()}}
	if err := wire.WriteFrame(conn, t.hello); err != nil {
		return terms{}, fmt.Errorf("send hello: %w", err)
	}
	if err := wire.ReadFrame(conn, &t.intro); err != nil {
		return terms{}, fmt.Errorf("read introduction: %w", err)
	}
	t.welcome, err = judge(ctx, t, cfg)
	t.welcome.Time = clock()
	if err != nil {
		refused := &RefusedError{Reason: wire.RefusedInternal}
		errors.As(err, &refused)
		t.welcome = wire.Welcome{Time: t.welcome.Time, Refused: refused.Reason, Message: refused.Message}
		return terms{}, errors.Join(err, wire.WriteFrame(conn, t.welcome))
	}
	t.welcome.Refused, t.welcome.Message = "", ""
	t.welcome.Signature = ed25519.Sign(cfg.Key, wire.SessionText("gateway", t.hello, t.intro, cfg.Binding))
	if err := wire.WriteFrame(conn, t.welcome); err != nil {
		return terms{}, fmt.Errorf("send welcome: %w", err)
	}
	t.intro.Token, t.at = "", time.Now()
	return t, nil
}

// judge decides about an introduction: version, proof of the key, then Offer.
func judge(ctx context.Context, t terms, cfg GatewayConfig) (wire.Welcome, error) {
	ours := span{wire.MinVersion, wire.Version}
	if _, err := agree("gateway", ours, "agent", span{t.intro.Version, t.intro.Version}); err != nil {
		return wire.Welcome{}, err
	}
	text := wire.SessionText("agent", t.hello, t.intro, cfg.Binding)
	if len(t.intro.Nonce) != nonceSize || !wire.Verified(t.intro.PublicKey, text, t.intro.Signature) {
		return wire.Welcome{}, &RefusedError{Reason: wire.RefusedCredential, Message: "the introduction is not signed by its key"}
	}
	w, err := cfg.Offer(ctx, t.hello, t.intro)
	if err != nil {
		return wire.Welcome{}, fmt.Errorf("target %q: %w", plain(t.intro.Target), err)
	}
	return w, nil
}

func connectHandshake(conn net.Conn, cfg AgentConfig) (terms, error) {
	var t terms
	if err := wire.ReadFrame(conn, &t.hello); err != nil {
		return terms{}, fmt.Errorf("read hello: %w", err)
	}
	nonce, err := newNonce()
	if err != nil {
		return terms{}, err
	}
	t.intro = wire.Introduction{Version: wire.Version, AgentVersion: cfg.Version}
	version, err := agree("agent", span{wire.MinVersion, wire.Version}, "gateway", span{t.hello.MinVersion, t.hello.Version})
	if err != nil {
		// The bare version lets the gateway say the same in its log.
		return terms{}, errors.Join(err, wire.WriteFrame(conn, t.intro))
	}
	if len(t.hello.Nonce) != nonceSize {
		return terms{}, fmt.Errorf("hello with a nonce of %d bytes: %w", len(t.hello.Nonce), ErrProtocol)
	}
	t.intro = wire.Introduction{
		Version: version, AgentVersion: cfg.Version, Target: cfg.Target, Generation: cfg.Generation,
		Link: cfg.Link, Nonce: nonce, PublicKey: cfg.Key.Public().(ed25519.PublicKey), Token: cfg.Token,
	}
	t.intro.Signature = ed25519.Sign(cfg.Key, wire.SessionText("agent", t.hello, t.intro, cfg.Binding))
	if err := wire.WriteFrame(conn, t.intro); err != nil {
		return terms{}, fmt.Errorf("send introduction: %w", err)
	}
	if err := wire.ReadFrame(conn, &t.welcome); err != nil {
		return terms{}, fmt.Errorf("read welcome: %w", err)
	}
	t.at = time.Now()
	if t.welcome.Refused != "" {
		return terms{}, &RefusedError{Reason: wire.Refusal(plain(string(t.welcome.Refused))), Message: plain(t.welcome.Message)}
	}
	text := wire.SessionText("gateway", t.hello, t.intro, cfg.Binding)
	if cfg.GatewayKey != nil && !wire.Verified(cfg.GatewayKey, text, t.welcome.Signature) {
		return terms{}, ErrGatewayKey
	}
	t.intro.Token = ""
	return t, nil
}

func newNonce() ([]byte, error) {
	nonce := make([]byte, nonceSize)
	if _, err := rand.Read(nonce); err != nil {
		return nil, fmt.Errorf("make nonce: %w", err)
	}
	return nonce, nil
}

// span is the protocol versions a program speaks, both ends included.
type span struct{ oldest, newest int }

func (s span) String() string {
	if s.oldest == s.newest {
		return fmt.Sprintf("version %d", s.newest)
	}
	return fmt.Sprintf("versions %d to %d", s.oldest, s.newest)
}

// agree picks the newest version in both spans. Its error names the side that
// is too old.
func agree(me string, mine span, peer string, theirs span) (int, error) {
	version := min(mine.newest, theirs.newest)
	if version >= mine.oldest && version >= theirs.oldest {
		return version, nil
	}
	older := me
	if theirs.newest < mine.oldest {
		older = peer
	}
	return 0, &RefusedError{
		Reason:  wire.RefusedVersion,
		Message: fmt.Sprintf("the %s speaks %v, the %s %v: update the %s", me, mine, peer, theirs, older),
	}
}
