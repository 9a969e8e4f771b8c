package front

import (
	"net"

	"golang.org/x/sys/unix"
)

// quickAck makes the kernel acknowledge at once, for now.
func quickAck(c *net.TCPConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var opt error
	err = raw.Control(func(fd uintptr) {
		opt = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_QUICKACK, 1)
	})
	if err != nil {
		return err
	}
	return opt
}
