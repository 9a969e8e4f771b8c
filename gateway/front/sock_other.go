//go:build !linux

package front

import "net"

// quickAck exists on Linux only; elsewhere connections work without it.
func quickAck(*net.TCPConn) error { return nil }
