//go:build !linux

package sshd

import "net"

// quickAck does nothing: only Linux has the socket option.
func quickAck(net.Conn) {}
