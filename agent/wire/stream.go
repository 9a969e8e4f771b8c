package wire

// Services that every agent offers by name.
const (
	ServiceSSH = "ssh" // the SSH session server
	ServiceAPI = "api" // the HTTP API
)

// OpenRequest is the first frame on a stream that a gateway opens. Exactly one
// field is set.
type OpenRequest struct {
	Service string `json:"service,omitempty"` // one of the services above
	Port    uint16 `json:"port,omitempty"`    // a TCP port as the agent's watch sees it
	Unix    string `json:"unix,omitempty"`    // path of a unix socket in the target
}

// OpenReply answers it, before the first byte of data.
type OpenReply struct {
	Status  Status `json:"status"`
	Message string `json:"message,omitempty"` // for people, "" when OK
}

// Status is the outcome of opening a stream.
type Status string

// The outcomes.
const (
	StatusOK        Status = "ok"
	StatusRefused   Status = "refused" // nothing listens
	StatusTimeout   Status = "timeout"
	StatusNoService Status = "no such service"
	StatusDenied    Status = "denied"
	StatusDraining  Status = "draining"
	StatusFailed    Status = "failed"
)

// Control is one frame on the control stream, the first stream of a session.
type Control struct {
	Kind   ControlKind `json:"kind"`
	ID     uint64      `json:"id,omitempty"`     // ping and pong: pairs them
	Stream uint32      `json:"stream,omitempty"` // reset and stop: yamux stream ID
	Reason string      `json:"reason,omitempty"` // reset, drain, bye
}

// ControlKind says what a control frame means.
type ControlKind string

// The control frames.
const (
	ControlPing  ControlKind = "ping"
	ControlPong  ControlKind = "pong"
	ControlReset ControlKind = "reset" // abort one stream both ways
	ControlStop  ControlKind = "stop"  // the sender reads no more of one stream
	ControlDrain ControlKind = "drain" // open no new streams
	ControlBye   ControlKind = "bye"   // orderly end: what follows is not a loss
)
