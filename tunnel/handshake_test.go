package tunnel

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"helix.local/helix/agent/wire"
)

func TestAgree(t *testing.T) {
	for name, c := range map[string]struct {
		mine, theirs span
		want         int
		text         string
	}{
		"same":          {span{1, 1}, span{1, 1}, 1, ""},
		"newest common": {span{1, 3}, span{2, 5}, 3, ""},
		"peer behind":   {span{2, 4}, span{1, 2}, 2, ""},
		"peer too old":  {span{3, 4}, span{1, 2}, 0, "the gateway speaks versions 3 to 4, the agent versions 1 to 2: update the agent"},
		"I am too old":  {span{1, 1}, span{2, 3}, 0, "the gateway speaks version 1, the agent versions 2 to 3: update the gateway"},
	} {
		got, err := agree("gateway", c.mine, "agent", c.theirs)
		if got != c.want || (err == nil) != (c.text == "") || err != nil && !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %d, %v", name, got, err)
		}
	}
}

type ends struct {
	gateway              GatewayConfig
	agentCfg             AgentConfig
	gatewayErr, agentErr error
}

func (e *ends) run(t *testing.T) {
	t.Helper()
	a, b := sockets(t, "unix")
	got := make(chan error)
	go func() {
		s, err := Connect(t.Context(), b, e.agentCfg)
		if s != nil {
			defer func() { _ = s.Close() }()
		}
		got <- err
	}()
	s, err := Accept(t.Context(), a, e.gateway)
	e.gatewayErr, e.agentErr = err, <-got
	if s != nil {
		_ = s.Close()
	}
}

func TestHandshakeRefusals(t *testing.T) {
	key := newKey(t)
	public := key.Public().(ed25519.PublicKey)
	for name, c := range map[string]struct {
		change  func(*ends)
		reason  wire.Refusal
		gateway error
		agent   error
	}{
		"offer refuses": {
			change: func(e *ends) {
				e.gateway.Offer = func(context.Context, wire.Hello, wire.Introduction) (wire.Welcome, error) {
					return wire.Welcome{}, fmt.Errorf("pair: %w", &RefusedError{Reason: wire.RefusedToken, Message: "used at noon"})
				}
			},
			reason: wire.RefusedToken,
		},
		"offer fails inside": {
			change: func(e *ends) {
				e.gateway.Offer = func(context.Context, wire.Hello, wire.Introduction) (wire.Welcome, error) {
					return wire.Welcome{}, errors.New("disk on fire")
				}
			},
			reason: wire.RefusedInternal,
		},
		"other binding": {
			change: func(e *ends) { e.agentCfg.Binding = []byte("elsewhere") },
			reason: wire.RefusedCredential,
		},
		"other gateway": {
			change: func(e *ends) { e.agentCfg.GatewayKey = newKey(t).Public().(ed25519.PublicKey) },
			agent:  ErrGatewayKey, gateway: ErrClosed,
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := &ends{
				gateway:  GatewayConfig{Key: key, Offer: accept(1), Binding: []byte("b")},
				agentCfg: AgentConfig{Target: "t", Key: newKey(t), GatewayKey: public, Binding: []byte("b"), Token: "secret-token"},
			}
			c.change(e)
			e.run(t)
			if c.reason != "" {
				var refused *RefusedError
				if !errors.As(e.agentErr, &refused) || refused.Reason != c.reason {
					t.Errorf("agent: %v", e.agentErr)
				}
				if e.gatewayErr == nil {
					t.Error("gateway took the agent")
				}
				if strings.Contains(e.agentErr.Error(), "fire") {
					t.Errorf("inner words reach the agent: %v", e.agentErr)
				}
			}
			if c.agent != nil && !errors.Is(e.agentErr, c.agent) {
				t.Errorf("agent: %v", e.agentErr)
			}
			if text := fmt.Sprint(e.gatewayErr, e.agentErr); strings.Contains(text, "secret-token") {
				t.Errorf("token shown: %s", text)
			}
		})
	}
}

func TestOfferSeesTheIntroduction(t *testing.T) {
	key, agentKey := newKey(t), newKey(t)
	now := time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)
	var seen wire.Introduction
	e := &ends{
		gateway: GatewayConfig{Key: key, Clock: func() time.Time { return now }, Offer: func(_ context.Context, h wire.Hello, in wire.Introduction) (wire.Welcome, error) {
			seen = in
			if !h.Time.Equal(now) {
				t.Errorf("hello's time %v", h.Time)
			}
			return wire.Welcome{Session: "n"}, nil
		}},
		agentCfg: AgentConfig{Target: "vm", Generation: 3, Version: "1.2", Link: wire.LinkSerial, Key: agentKey, Token: "tok"},
	}
	e.run(t)
	must(t, e.gatewayErr, e.agentErr)
	if seen.Target != "vm" || seen.Generation != 3 || seen.AgentVersion != "1.2" || seen.Link != wire.LinkSerial ||
		string(seen.Token) != "tok" || !agentKey.Public().(ed25519.PublicKey).Equal(ed25519.PublicKey(seen.PublicKey)) {
		t.Errorf("seen %+v", seen)
	}
}

// What a peer that is none of ours may send first.
func TestHandshakeWithStrangers(t *testing.T) {
	key := newKey(t)
	gateway := func(ctx context.Context, c net.Conn, l Limits) error {
		s, err := Accept(ctx, c, GatewayConfig{Key: key, Offer: accept(1), Limits: l})
		if s != nil {
			_ = s.Close()
		}
		return err
	}
	agent := func(ctx context.Context, c net.Conn, l Limits) error {
		s, err := Connect(ctx, c, AgentConfig{Key: key, Limits: l})
		if s != nil {
			_ = s.Close()
		}
		return err
	}
	done, cancel := context.WithCancel(t.Context())
	cancel()
	short := Limits{Handshake: 30 * time.Millisecond}
	for name, c := range map[string]struct {
		run    func(context.Context, net.Conn, Limits) error
		ctx    context.Context
		limits Limits
		say    func(net.Conn) error
		want   error
	}{
		"silence to gateway":  {gateway, t.Context(), short, nil, context.DeadlineExceeded},
		"silence to agent":    {agent, t.Context(), short, nil, context.DeadlineExceeded},
		"context is over":     {gateway, done, Limits{}, nil, context.Canceled},
		"rubbish to gateway":  {gateway, t.Context(), Limits{}, sayBytes("GET / HTTP/1.1\r\n\r\n"), wire.ErrFrameSize},
		"rubbish to agent":    {agent, t.Context(), Limits{}, sayBytes("SSH-2.0-OpenSSH\r\n"), wire.ErrFrameSize},
		"new gateway":         {agent, t.Context(), Limits{}, say(wire.Hello{Version: 9, MinVersion: 8}), errRefusedVersion},
		"short nonce":         {agent, t.Context(), Limits{}, say(wire.Hello{Version: 1, MinVersion: 1, Nonce: []byte("x")}), ErrProtocol},
		"new agent":           {gateway, t.Context(), Limits{}, say(wire.Introduction{Version: 9}), errRefusedVersion},
		"unsigned":            {gateway, t.Context(), Limits{}, say(wire.Introduction{Version: 1, Nonce: make([]byte, 32), PublicKey: make([]byte, 32)}), nil},
		"gateway limit wrong": {gateway, t.Context(), Limits{Window: 1}, nil, nil},
		"agent limit wrong":   {agent, t.Context(), Limits{Window: 1, MaxStreams: -1, Dead: -1}, nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := sockets(t, "unix")
			if c.say != nil {
				must(t, c.say(b))
			}
			err := c.run(c.ctx, a, c.limits)
			if err == nil || c.want != nil && !errors.Is(err, c.want) && !(c.want == errRefusedVersion && isRefusedVersion(err)) {
				t.Errorf("got %v, want %v", err, c.want)
			}
			if _, err := a.Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
				t.Errorf("connection was left open: %v", err)
			}
		})
	}
	a, _ := sockets(t, "unix")
	if _, err := Accept(t.Context(), a, GatewayConfig{}); err == nil {
		t.Error("accepted without key and offer")
	}
	b, _ := sockets(t, "unix")
	if _, err := Connect(t.Context(), b, AgentConfig{}); err == nil {
		t.Error("connected without a key")
	}
}

var errRefusedVersion = errors.New("refused for its version")

func isRefusedVersion(err error) bool {
	var refused *RefusedError
	return errors.As(err, &refused) && refused.Reason == wire.RefusedVersion && strings.Contains(refused.Message, "update the")
}

func say(v any) func(net.Conn) error { return func(c net.Conn) error { return wire.WriteFrame(c, v) } }

func sayBytes(s string) func(net.Conn) error {
	return func(c net.Conn) error { return second(c.Write([]byte(s))) }
}

func TestRefusedErrorTellsWhatToDo(t *testing.T) {
	for reason, want := range map[wire.Refusal]string{
		wire.RefusedVersion: "update", wire.RefusedToken: "restart", wire.RefusedExpired: "restart",
		wire.RefusedGeneration: "restart", wire.RefusedCredential: "pair", wire.RefusedTarget: "removed", wire.RefusedInternal: "",
	} {
		e := &RefusedError{Reason: reason}
		if h := e.Hint(); !strings.Contains(h, want) || (want == "") != (h == "") {
			t.Errorf("%s: hint %q", reason, h)
		}
		if !strings.HasPrefix(e.Error(), "session refused: "+string(reason)) {
			t.Error(e)
		}
	}
}

func TestPlainText(t *testing.T) {
	for in, want := range map[string]string{
		"ok": "ok", "a\x1b[2Jb\nc": "a [2Jb c", "\xff": "?", strings.Repeat("é", 200): strings.Repeat("é", 150) + "...",
	} {
		if got := plain(in); got != want {
			t.Errorf("%q: %q", in, got)
		}
	}
}
