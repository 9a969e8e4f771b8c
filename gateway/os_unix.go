//go:build unix

package gateway

import (
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// linkBuffer is the socket buffer of a dir target's link, in bytes. With the
// default of 208 KiB a bulk sender waits for the other side at every turn.
const linkBuffer = 1 << 20

// socketPair returns a connected pair: a connection for us and a file for a child.
func socketPair() (net.Conn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make the agent's link: %w", err)
	}
	for _, fd := range fds {
		unix.CloseOnExec(fd)
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, linkBuffer) // slower when refused
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "link"), os.NewFile(uintptr(fds[1]), "agent link")
	defer ours.Close()
	conn, err := net.FileConn(ours)
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("make the agent's link: %w", err), theirs.Close())
	}
	return conn, theirs, nil
}

// ownGroup keeps a Ctrl-C at the gateway's terminal away from the child: the
// gateway ends it in its own time.
func ownGroup() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// readable says whether this process may list and enter the folder.
func readable(path string) error { return unix.Access(path, unix.R_OK|unix.X_OK) }

// ownerOf is the number of the user that a file belongs to.
func ownerOf(info os.FileInfo) (uid int, ok bool) {
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, false
	}
	return int(stat.Uid), true
}

// tryLock takes the kernel's lock on f, which ends with the process.
func tryLock(f *os.File) error { return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) }

// listenPrivate listens on a unix socket that only its owner can open. A
// socket file left by a dead gateway is replaced: the state lock is held.
func listenPrivate(path string) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("listen at %s: %w", path, err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen at %s: %w", path, err)
	}
	// The state folder is 0700, so nobody gets in before this either.
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("listen at %s: %w", path, err), l.Close())
	}
	return l, nil
}
