package agent

import (
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"

	"helix.local/helix/agent/wire"
)

// SFTPCommand is the argument with which the agent's program serves sftp on
// its standard streams.
const SFTPCommand = "sftp-server"

// ParseBoot reads and checks what an agent is told. Errors never quote it: it
// holds a secret.
func ParseBoot(text []byte) (wire.Boot, error) {
	var b wire.Boot
	if err := json.Unmarshal(text, &b); err != nil {
		if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
			return wire.Boot{}, fmt.Errorf("parse boot parameters: malformed JSON at byte %d", syntax.Offset)
		}
		return wire.Boot{}, errors.New("parse boot parameters: not the expected JSON")
	}
	var faults []error
	fault := func(bad bool, format string, args ...any) {
		if bad {
			faults = append(faults, fmt.Errorf(format, args...))
		}
	}
	fault(b.Version < wire.MinVersion || b.Version > wire.Version, "version %d: this agent speaks %d to %d", b.Version, wire.MinVersion, wire.Version)
	fault(!isLabel(b.Workspace), "workspace: not a host name label")
	fault(b.Target == "", "target: missing")
	fault(b.Token == "", "token: missing")
	fault(len(b.GatewayKey) != ed25519.PublicKeySize, "gateway_key: %d bytes, want %d", len(b.GatewayKey), ed25519.PublicKeySize)
	fault(b.Dir != "" && !filepath.IsAbs(b.Dir), "dir: not an absolute path")
	if b.Address != "" {
		_, err := netip.ParseAddr(b.Address)
		fault(err != nil, "address: not an IP address")
	}
	if b.Link != "" {
		_, _, err := net.SplitHostPort(b.Link)
		fault(err != nil, "link: not host:port")
	}
	if err := errors.Join(faults...); err != nil {
		return wire.Boot{}, fmt.Errorf("check boot parameters: %w", err)
	}
	return b, nil
}

// isLabel reports whether name can be a host name's label (RFC 1123).
func isLabel(name string) bool {
	if name == "" || len(name) > 63 || name[0] == '-' || name[len(name)-1] == '-' {
		return false
	}
	for _, c := range []byte(name) {
		if c != '-' && (c < '0' || c > '9') && (c < 'a' || c > 'z') {
			return false
		}
	}
	return true
}
