// Package tunnel carries many streams over one connection between the gateway
// and an agent.
//
// A [Session] is one authenticated connection: [Accept] makes the gateway's
// end, [Connect] the agent's, whichever of the two dialled. The gateway opens
// streams with [Session.Open], the agent answers them in [Session.Serve]. A
// [Stream] is a net.Conn with a real half-close and a real reset, and it ends
// in io.EOF only when the peer has finished writing and every byte of it was
// read; the end of the session is always an error. [Relay] joins two
// connections under the same rules.
//
// The framing is yamux version 0 (spec.md in github.com/hashicorp/yamux), of
// which only data and window frames with SYN, ACK and FIN are used. Ping,
// reset, stop, drain and bye are frames of agent/wire on the session's first
// stream, because yamux has no priority, no half-close beside its close, and no
// reset of one stream.
//
// A Session takes any net.Conn. That is where the resumable link of a remote
// host goes: below the Session, as a net.Conn that outlives its transports.
//
// Sizes are in bytes, and zero in a Config or [Limits] field means its default.
// Errors come wrapped: test them with errors.Is and errors.As.
package tunnel
