package wire

import (
	"crypto/ed25519"
	"encoding/binary"
	"fmt"
	"log/slog"
	"time"
)

// Boot is what an agent is told before it can speak to its gateway. A guest
// reads it from fw_cfg, an agent on the gateway's machine from standard input.
type Boot struct {
	Version    int    `json:"version"`
	Workspace  string `json:"workspace"`
	Zone       string `json:"zone"` // without dots at the ends: "helix.local"
	Target     string `json:"target"`
	Generation uint64 `json:"generation"` // counts starts of the target
	Token      Secret `json:"token"`      // one-time bootstrap secret
	GatewayKey []byte `json:"gateway_key"`
	Dir        string `json:"dir,omitempty"`     // the workspace folder
	Address    string `json:"address,omitempty"` // HELIX_ADDR of the workspace's programs
	Link       string `json:"link,omitempty"`    // host:port the agent dials as its fast link
}

// Secret is text that must not be seen: it prints and logs as "redacted".
type Secret string

// String hides the secret.
func (Secret) String() string { return "redacted" }

// GoString hides the secret from %#v.
func (Secret) GoString() string { return "redacted" }

// LogValue hides the secret.
func (Secret) LogValue() slog.Value { return slog.StringValue("redacted") }

// Link kinds, best first for bulk.
const (
	LinkUnix   = "unix"
	LinkTCP    = "tcp"
	LinkSerial = "serial"
)

// Hello opens a session; the gateway sends it whichever side dialled.
type Hello struct {
	Version    int       `json:"version"`
	MinVersion int       `json:"min_version"`
	Nonce      []byte    `json:"nonce"` // 32 random bytes
	Time       time.Time `json:"time"`  // the gateway's clock
}

// Introduction is the agent's answer. With a Token it asks to be paired: the
// public key becomes the target's credential. Without, it claims that key.
type Introduction struct {
	Version      int    `json:"version"`
	AgentVersion string `json:"agent_version"`
	Target       string `json:"target"`
	Generation   uint64 `json:"generation"`
	Link         string `json:"link"`
	Nonce        []byte `json:"nonce"`
	PublicKey    []byte `json:"public_key"`
	Token        Secret `json:"token,omitempty"`
	Signature    []byte `json:"signature"` // over SessionText("agent", ...)
}

// Welcome ends the handshake. With Refused set the session does not start.
type Welcome struct {
	Session   string    `json:"session,omitempty"`
	Epoch     uint64    `json:"epoch,omitempty"` // grows with each session of the target
	Time      time.Time `json:"time"`
	Refused   Refusal   `json:"refused,omitempty"`
	Message   string    `json:"message,omitempty"`
	Signature []byte    `json:"signature,omitempty"` // over SessionText("gateway", ...)
}

// Refusal says why a gateway turned an agent down.
type Refusal string

// The refusals.
const (
	RefusedVersion    Refusal = "version"
	RefusedTarget     Refusal = "unknown target"
	RefusedToken      Refusal = "token used or wrong"
	RefusedExpired    Refusal = "token expired"
	RefusedCredential Refusal = "credential not known"
	RefusedGeneration Refusal = "stale generation"
	RefusedInternal   Refusal = "internal"
)

// SessionText is what each side signs: the role, both nonces, the identity of
// the agent, and binding, which ties the signature to the secure channel below
// (nil where the link itself is private to the machine). Every part is length
// prefixed, so no two different handshakes have one text.
func SessionText(role string, h Hello, in Introduction, binding []byte) []byte {
	text := []byte("helix session 1\x00")
	for _, part := range [][]byte{
		[]byte(role), h.Nonce, in.Nonce, []byte(in.Target), fmt.Append(nil, in.Generation),
		[]byte(in.Link), in.PublicKey, binding,
	} {
		text = binary.BigEndian.AppendUint32(text, uint32(len(part)))
		text = append(text, part...)
	}
	return text
}

// Verified reports whether signature over text was made by the owner of key.
// A key of the wrong length is never verified.
func Verified(key, text, signature []byte) bool {
	return len(key) == ed25519.PublicKeySize && ed25519.Verify(key, text, signature)
}
