package tunnel

import (
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// tcpClose is TCP_CLOSE of include/net/tcp_states.h.
const tcpClose = 7

// abortedTCP reports whether c is a TCP socket that has left the connected
// states. Before our own FIN only a reset or a time-out does that.
func abortedTCP(c net.Conn) bool {
	if _, ok := c.LocalAddr().(*net.TCPAddr); !ok {
		return false
	}
	socket, ok := c.(syscall.Conn) // also something around a *net.TCPConn
	if !ok {
		return false
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return true // closed under us
	}
	var info *unix.TCPInfo
	var infoErr error
	if err := raw.Control(func(fd uintptr) {
		info, infoErr = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	}); err != nil {
		return true
	}
	return infoErr == nil && info.State == tcpClose
}
