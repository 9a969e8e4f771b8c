package tunnel

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"helix.local/helix/agent/wire"
)

// Offer is the gateway's decision about an agent that has proved it owns the
// public key of its introduction. It returns the session's name and epoch; the
// time and the signature are filled in. A *RefusedError turns the agent down
// with that reason, another error with RefusedInternal and no details.
type Offer func(ctx context.Context, h wire.Hello, in wire.Introduction) (wire.Welcome, error)

// GatewayConfig is what Accept needs.
type GatewayConfig struct {
	Key     ed25519.PrivateKey // proves the gateway to the agent; required
	Offer   Offer              // required
	Binding []byte             // of the secure channel below; nil on a private link
	Clock   func() time.Time   // told to the agent; nil is time.Now
	Log     *slog.Logger       // nil discards
	Limits  Limits
}

// AgentConfig is what Connect needs.
type AgentConfig struct {
	Target     string             // which target this agent is, of wire.Boot
	Generation uint64             // of wire.Boot
	Version    string             // of this program, for people
	Link       string             // wire.LinkUnix, LinkTCP or LinkSerial
	Key        ed25519.PrivateKey // the target's credential; required
	Token      wire.Secret        // asks to be paired; "" claims Key
	GatewayKey []byte             // of wire.Boot; nil accepts any gateway
	Binding    []byte             // of the secure channel below; nil on a private link
	Log        *slog.Logger       // nil discards
	Limits     Limits
}

// Limits bounds a session. Both ends have their own; they need not be equal.
type Limits struct {
	Handshake  time.Duration // whole handshake; 10 s
	MaxStreams int           // open at one time; 16384
	Window     int           // unread bytes of one stream, at least 256 KiB; 1 MiB

	// MaxUnread bounds the received and unread bytes of all streams; 64 MiB.
	// Beyond it the stream with the most unread bytes is reset. A peer that
	// goes on sending on streams it was told to end, beyond as much again, loses
	// the session.
	MaxUnread int

	ProbeActive time.Duration // silence before a probe while streams are open; 5 s
	ProbeIdle   time.Duration // the same without streams; 20 s
	Dead        time.Duration // silence after a probe that ends the session; 9 s
}

func (l Limits) withDefaults() Limits {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	size := func(n *int, v int) {
		if *n == 0 {
			*n = v
		}
	}
	def(&l.Handshake, 10*time.Second)
	def(&l.ProbeActive, 5*time.Second)
	def(&l.ProbeIdle, 20*time.Second)
	def(&l.Dead, 9*time.Second)
	size(&l.MaxStreams, 16384)
	size(&l.Window, 1<<20)
	size(&l.MaxUnread, 64<<20)
	return l
}

// Validate reports every field that no session can work with.
func (l Limits) Validate() error {
	l = l.withDefaults()
	var errs []error
	for _, d := range []struct {
		name  string
		value time.Duration
	}{
		{"handshake", l.Handshake}, {"probe_active", l.ProbeActive}, {"probe_idle", l.ProbeIdle}, {"dead", l.Dead},
	} {
		if d.value < 0 {
			errs = append(errs, fmt.Errorf("%s %v: is negative", d.name, d.value))
		}
	}
	if l.MaxStreams < 0 {
		errs = append(errs, fmt.Errorf("max_streams %d: is negative", l.MaxStreams))
	}
	if l.Window < minWindow || l.Window > maxWindow {
		errs = append(errs, fmt.Errorf("window %d: not in %d to %d", l.Window, minWindow, maxWindow))
	}
	if l.MaxUnread < l.Window {
		errs = append(errs, fmt.Errorf("max_unread %d: less than one window of %d", l.MaxUnread, l.Window))
	}
	return errors.Join(errs...)
}

const (
	minWindow = 256 << 10 // what yamux starts every stream with
	maxWindow = 64 << 20
)

func logger(l *slog.Logger) *slog.Logger {
	if l == nil {
		return slog.New(slog.DiscardHandler)
	}
	return l
}
