//go:build unix

package main

import (
	"fmt"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

func execSignals() []os.Signal {
	return []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGWINCH}
}

func isResize(s os.Signal) bool { return s == syscall.SIGWINCH }

// become replaces this process by the program at path.
func (a *app) become(path string, argv []string) error {
	if err := syscall.Exec(path, argv, os.Environ()); err != nil {
		return fmt.Errorf("run %s: %w", path, err)
	}
	return nil
}

// passConn sends the descriptor of conn over the unix socket out, in the form
// that OpenSSH reads with ProxyUseFDPass: one byte with SCM_RIGHTS.
func passConn(conn *net.UnixConn, out any) error {
	file, ok := out.(*os.File)
	if !ok {
		return errNoSocket
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return fmt.Errorf("pass descriptor: %w", err)
	}
	var sendErr error
	err = raw.Control(func(fd uintptr) {
		// The receiver expects a blocking descriptor or sets what it needs itself.
		sendErr = unix.Sendmsg(int(file.Fd()), []byte{0}, unix.UnixRights(int(fd)), nil, 0)
	})
	switch {
	case err != nil:
		return fmt.Errorf("pass descriptor: %w", err)
	case sendErr == unix.ENOTSOCK:
		return errNoSocket
	case sendErr != nil:
		return fmt.Errorf("pass descriptor: %w", sendErr)
	}
	return nil
}

// hungUp reports whether the peer has closed conn both ways, rather than only
// ended its own. It must not be called before the peer's end has been read.
func hungUp(conn *net.UnixConn) bool {
	raw, err := conn.SyscallConn()
	if err != nil {
		return true
	}
	gone := false
	err = raw.Control(func(fd uintptr) { gone = polledHangUp(fd) })
	return err != nil || gone
}

// awaitHangUp returns when the peer has closed conn both ways, or conn is
// closed.
func awaitHangUp(conn *net.UnixConn) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return // it is closed
	}
	_ = raw.Read(polledHangUp) // the runtime asks again at each change; an error means closed
}

func polledHangUp(fd uintptr) bool {
	set := []unix.PollFd{{Fd: int32(fd)}}
	n, err := unix.Poll(set, 0)
	return err == nil && n > 0 && set[0].Revents&(unix.POLLHUP|unix.POLLERR) != 0
}

// endOutput ends what out writes to. One socket may be both standard input and
// output: closing a descriptor would not end it then.
func endOutput(out any) error {
	file, ok := out.(*os.File)
	if !ok {
		return nil
	}
	if err := unix.Shutdown(int(file.Fd()), unix.SHUT_WR); err != nil && err != unix.ENOTSOCK && err != unix.ENOTCONN {
		return fmt.Errorf("end standard output: %w", err)
	}
	if err := file.Close(); err != nil {
		return fmt.Errorf("end standard output: %w", err)
	}
	return nil
}
