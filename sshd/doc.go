// Package sshd is the gateway's side of SSH: the keys of an installation, who
// may log in, the jump host, the answer given for a workspace that cannot be
// reached, and the configuration that OpenSSH clients read.
//
// A workspace's SSH connection does not end here: it goes as raw bytes to the
// SSH server of its agent, which presents the key and certificate that
// [Keys.Host] makes. See RFC 4251 to 4254, and PROTOCOL.certkeys of OpenSSH for
// certificates.
//
// Errors that a person can cure have a Hint method.
package sshd

import (
	"errors"
	"net"
	"net/netip"
	"strings"
)

// GatewayName is the workspace-like name of the gateway itself. No workspace
// may have it.
const GatewayName = "gw"

// ErrProhibited, wrapped by an error of ServerConfig.Dial, tells the client
// that the connection is not allowed, rather than that it did not succeed.
var ErrProhibited = errors.New("not allowed")

// Conn is a connection whose two directions end apart.
type Conn interface {
	net.Conn
	// CloseWrite ends the sending direction only.
	CloseWrite() error
}

// hinter is an error that a person can cure.
type hinter interface{ Hint() string }

// keyError is what is wrong with one file or text, and its cure.
type keyError struct {
	what, hint string
	err        error
}

func (e *keyError) Error() string { return e.what + ": " + e.err.Error() }
func (e *keyError) Unwrap() error { return e.err }

// Hint is the next thing a person can try.
func (e *keyError) Hint() string { return e.hint }

// defaultZones are the zones of an installation that names none.
func defaultZones(zones []string) []string {
	if len(zones) > 0 {
		return zones
	}
	return []string{"helix.local", "helix.internal"}
}

// workspaceOf takes the workspace's name from what a client calls a host: the
// bare name, or a name in one of zones, where the label before the zone counts.
// An address is returned as it is: who dials knows whose it is.
func workspaceOf(host string, zones []string) (name string, ok bool) {
	if addr, err := netip.ParseAddr(strings.Trim(host, "[]")); err == nil {
		return addr.String(), true
	}
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	for _, zone := range zones {
		if under, found := strings.CutSuffix(host, "."+zone); found {
			host = under[strings.LastIndexByte(under, '.')+1:]
			break
		}
	}
	return host, isLabel(host)
}

// isLabel reports whether name is one lower-case DNS label, which also makes it
// safe as a file name and in every file written here.
func isLabel(name string) bool {
	if name == "" || len(name) > 63 || name[0] == '-' || name[len(name)-1] == '-' {
		return false
	}
	for _, c := range []byte(name) {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
			return false
		}
	}
	return true
}
