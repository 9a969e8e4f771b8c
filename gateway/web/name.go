package web

import (
	"net"
	"strconv"
	"strings"
)

// GatewayLabel is the label under a zone that leads to the gateway itself.
const GatewayLabel = "gw"

// Name is what a host name asks for. At most one of Service and Port is set;
// with neither it is the workspace's main web service.
type Name struct {
	Host      string // lower case, without port and final dot
	Workspace string // the label below the zone; "" for the bare zone
	Service   string // SERVICE.NAME.zone
	Port      uint16 // PORT.NAME.zone
}

// Gateway reports whether the name is the gateway's own: gw.ZONE or the bare
// zone.
func (n Name) Gateway() bool { return n.Workspace == "" || n.Workspace == GatewayLabel }

// ParseName takes a Host header or server name apart. It reports false for
// what is not a host name of one of zones. Names deeper than one label below
// the workspace (a.b.NAME.zone) ask for the main service.
func ParseName(host string, zones []string) (Name, bool) {
	if strings.Contains(host, ":") {
		h, port, err := net.SplitHostPort(host)
		if err != nil || !decimal(port) {
			return Name{}, false
		}
		host = h
	}
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	if len(host) > 253 {
		return Name{}, false
	}
	for _, zone := range zones {
		if host == zone {
			return Name{Host: host}, true
		}
		rest, ok := strings.CutSuffix(host, "."+zone)
		if !ok {
			continue
		}
		labels := strings.Split(rest, ".")
		for _, label := range labels {
			if !validLabel(label) {
				return Name{}, false
			}
		}
		n := Name{Host: host, Workspace: labels[len(labels)-1]}
		if len(labels) == 2 {
			if n.Port = portLabel(labels[0]); n.Port == 0 {
				n.Service = labels[0]
			}
		}
		return n, true
	}
	return Name{}, false
}

// validLabel accepts RFC 1123 labels and, as in _dmarc, underscores: the
// children of a workspace belong to its programs.
func validLabel(s string) bool {
	if s == "" || len(s) > 63 || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	for _, c := range []byte(s) {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' && c != '_' {
			return false
		}
	}
	return true
}

// portLabel is the port a label names, 0 for none. A leading zero makes a
// service name: every port has exactly one host name.
func portLabel(s string) uint16 {
	if !decimal(s) || s[0] == '0' {
		return 0
	}
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil {
		return 0 // out of range
	}
	return uint16(n)
}

func decimal(s string) bool {
	for _, c := range []byte(s) {
		if c < '0' || c > '9' {
			return false
		}
	}
	return s != ""
}
