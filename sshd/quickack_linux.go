package sshd

import (
	"net"

	"golang.org/x/sys/unix"
)

// quickAck asks for the next acknowledgement at once. A handshake is a row of
// small packets, and waiting with each acknowledgement costs more than all its
// cryptography. The kernel forgets the wish, so it is renewed at each read.
func quickAck(conn net.Conn) {
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		return
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) { // a wish only
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_QUICKACK, 1)
	})
}
