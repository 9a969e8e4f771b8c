package api

import (
	"context"
	"fmt"
	"net"
	"time"

	"helix.local/helix/agent/wire"
)

// ProxyRequest is the only frame a client sends on the proxy socket; the
// gateway answers with a wire.OpenReply, and what follows are the bytes of the
// connection it stands for. The descriptor may be handed to another process
// from then on.
type ProxyRequest struct {
	Host string `json:"host"` // a name of ours, with or without its zone
	Port uint16 `json:"port"`
}

// proxyTimeout bounds the time to the gateway's answer; reaching a target may
// take most of it.
const proxyTimeout = 60 * time.Second

// DialProxy connects to a port of a workspace through the gateway's proxy
// socket. The error of a gateway that could not connect is an *Error.
func DialProxy(ctx context.Context, socket string, req ProxyRequest) (*net.UnixConn, error) {
	var d net.Dialer
	plain, err := d.DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, dialError(ctx, socket, err)
	}
	conn := plain.(*net.UnixConn)
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := ask(conn, req); err != nil {
		_ = conn.Close() // the dial's own error is the one that matters
		return nil, err
	}
	return conn, nil
}

func ask(conn *net.UnixConn, req ProxyRequest) error {
	if err := conn.SetDeadline(time.Now().Add(proxyTimeout)); err != nil {
		return fmt.Errorf("connect to %s: %w", req.Host, err)
	}
	if err := wire.WriteFrame(conn, req); err != nil {
		return fmt.Errorf("connect to %s: %w", req.Host, err)
	}
	var reply wire.OpenReply
	if err := wire.ReadFrame(conn, &reply); err != nil {
		return fmt.Errorf("connect to %s: %w", req.Host, err)
	}
	if reply.Status != wire.StatusOK {
		return &Error{Code: CodeUnavailable, Message: reply.Message}
	}
	if err := conn.SetDeadline(time.Time{}); err != nil {
		return fmt.Errorf("connect to %s: %w", req.Host, err)
	}
	return nil
}
