package web

import (
	"errors"
	"fmt"
	"net/http"
	"time"
)

// Protocol is what a service speaks.
type Protocol string

// The protocols. The empty one is HTTP.
const (
	ProtocolHTTP  Protocol = "http"
	ProtocolHTTPS Protocol = "https" // any certificate is accepted: the stream is already private
	ProtocolH2C   Protocol = "h2c"   // HTTP/2 without TLS, as gRPC servers speak it
	ProtocolTLS   Protocol = "tls"   // terminates its own TLS; what arrives here nevertheless is served as https
)

// Route is where a name leads now.
type Route struct {
	Workspace string
	Port      uint16
	Protocol  Protocol
	// Pool separates idle connections: those made under one value are not
	// used for a request under another. Let it change with the active target
	// and its generation. Only letters, digits, dashes; "" is a value too.
	Pool string
}

// Reason says why a request found no upstream. It is the X-Helix-Reason header.
type Reason string

// The reasons, and what the client gets.
const (
	ReasonUnknownHost      Reason = "unknown-host"      // 404, the name is in no zone of ours
	ReasonUnknownWorkspace Reason = "unknown-workspace" // 404
	ReasonUnknownService   Reason = "unknown-service"   // 404
	ReasonMisdirected      Reason = "misdirected"       // 421, the connection belongs to another workspace
	ReasonStopped          Reason = "stopped"           // 503
	ReasonStarting         Reason = "starting"          // 503, the page loads itself again
	ReasonFailed           Reason = "failed"            // 502, the workspace's last start failed
	ReasonRefused          Reason = "refused"           // 502, nothing listens
	ReasonTunnelDown       Reason = "tunnel-down"       // 502
	ReasonBadAnswer        Reason = "bad-answer"        // 502, the service broke off or spoke no HTTP
	ReasonTimeout          Reason = "timeout"           // 504
)

// Status is the HTTP status that goes with the reason.
func (r Reason) Status() int {
	switch r {
	case ReasonUnknownHost, ReasonUnknownWorkspace, ReasonUnknownService:
		return http.StatusNotFound
	case ReasonMisdirected:
		return http.StatusMisdirectedRequest
	case ReasonStopped, ReasonStarting:
		return http.StatusServiceUnavailable
	case ReasonTimeout:
		return http.StatusGatewayTimeout
	case ReasonFailed, ReasonRefused, ReasonTunnelDown, ReasonBadAnswer:
		return http.StatusBadGateway
	default:
		return http.StatusBadGateway
	}
}

// RouteError is the one error that [Config.Resolve] and [Config.Dial] return
// when they know the reason. Everything but Reason is optional, and all text
// is shown to whoever asked.
type RouteError struct {
	Reason     Reason
	Workspace  string
	Port       uint16        // the port asked for
	Message    string        // one sentence more than the reason says
	Stage      string        // of a start in progress or failed
	Nearest    string        // name of an existing workspace that may have been meant
	Ports      []uint16      // ports of the workspace that do listen
	RetryAfter time.Duration // of ReasonStarting; 0 = 2 s
	Err        error         // the cause, for the log only
}

// Error is the reason in words.
func (e *RouteError) Error() string {
	s := fmt.Sprintf("route to %q: %s", e.Workspace, e.Reason)
	if e.Port != 0 {
		s = fmt.Sprintf("route to %q port %d: %s", e.Workspace, e.Port, e.Reason)
	}
	if e.Message != "" {
		s += ": " + e.Message
	}
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// Unwrap is the cause.
func (e *RouteError) Unwrap() error { return e.Err }

// asRouteError finds the reason in err, or gives it fallback.
func asRouteError(err error, fallback RouteError) *RouteError {
	if known, ok := errors.AsType[*RouteError](err); ok {
		return known
	}
	fallback.Err = err
	return &fallback
}
