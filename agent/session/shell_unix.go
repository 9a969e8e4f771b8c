//go:build linux || darwin

package session

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"
)

// terminals says that this system has pseudo-terminals.
const terminals = true

// A shellError reports an account whose shell cannot be run.
type shellError struct {
	account, shell string
	err            error
}

func (e *shellError) Error() string {
	return fmt.Sprintf("start shell %s of account %q: %v", e.shell, e.account, e.err)
}

func (e *shellError) Unwrap() error { return e.err }

// Hint is what a person can do about it.
func (e *shellError) Hint() string {
	return "install " + e.shell + " in the target, or name another shell for " + e.account + " in its /etc/passwd"
}

// shell is the command that runs command in a's shell, or a login shell when
// command is nil. note is for the user: why it does not start where it should.
func (s *Server) shell(a Account, command *string) (cmd *exec.Cmd, note string, err error) {
	if info, err := os.Stat(a.Shell); err != nil || info.IsDir() || info.Mode()&0o111 == 0 {
		reason := errors.Unwrap(err)
		if err == nil {
			reason = errors.New("not an executable file")
		}
		return nil, "", &shellError{a.Name, a.Shell, reason}
	}
	cmd = &exec.Cmd{Path: a.Shell, Args: []string{"-" + filepath.Base(a.Shell)}}
	if command != nil {
		cmd.Args = []string{filepath.Base(a.Shell), "-c", *command}
	}
	cmd.SysProcAttr = attributes(a)
	cmd.Env = merge([]string{"PATH=" + defaultPath}, s.cfg.Env, accountEnv(a))
	if cmd.Dir, note, err = s.folder(a); err != nil {
		return nil, "", err
	}
	return cmd, note, nil
}

// attributes make a process group leader that runs as a.
func attributes(a Account) *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{Setsid: true}
	if !a.Own {
		attr.Credential = &syscall.Credential{Uid: a.UID, Gid: a.GID, Groups: a.Groups}
	}
	return attr
}

// folder is where a's programs start. In a guest it is "/" with a note when the
// workspace folder is not there; on the user's own machine that is an error,
// because a command meant for one folder must not run in another.
func (s *Server) folder(a Account) (dir, note string, err error) {
	dir = a.Home
	if s.cfg.Dir != "" {
		dir = s.cfg.Dir
	}
	info, err := os.Stat(dir)
	switch {
	case err == nil && info.IsDir():
		return dir, "", nil
	case err == nil:
		err = syscall.ENOTDIR
	case errors.Is(err, fs.ErrNotExist):
		err = fs.ErrNotExist
	}
	if a.Own {
		return "", "", fmt.Errorf("workspace folder %s: %w", dir, err)
	}
	return "/", fmt.Sprintf("helix-agent: folder %s: %v; starting in /", dir, err), nil
}

// startTTY starts cmd with t as its controlling terminal.
func (s *Server) startTTY(cmd *exec.Cmd, a Account, t terminal) (*program, error) {
	master, slave, err := pty.Open()
	if err != nil {
		return nil, fmt.Errorf("open a terminal: %w", err)
	}
	defer func() { _ = slave.Close() }() // the child has its own
	started := false
	defer func() {
		if !started {
			_ = master.Close()
		}
	}()
	if !a.Own {
		if err := slave.Chown(int(a.UID), -1); err != nil {
			return nil, fmt.Errorf("hand terminal to %q: %w", a.Name, err)
		}
	}
	if err := slave.Chmod(0o620); err != nil && a.Own && os.Geteuid() == 0 {
		return nil, fmt.Errorf("protect terminal: %w", err)
	}
	if err := setModes(slave, t.modes); err != nil {
		return nil, err
	}
	if err := setSize(master, t.size); err != nil {
		return nil, err
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr.Setctty = true // Ctty 0: the child's standard input
	cmd.Env = append(cmd.Env, "SSH_TTY="+slave.Name())
	child, err := s.cfg.Reaper.Start(cmd)
	if err != nil {
		return nil, err //nolint:wrapcheck // names the program
	}
	started = true
	p := &program{child: child, tty: master, stdin: master, stdout: master, ended: make(chan struct{})}
	s.track(p)
	return p, nil
}

// setSize sets the size of the terminal whose master f is; the kernel tells
// the foreground process group.
func setSize(f *os.File, size windowPayload) error {
	if f == nil {
		return nil
	}
	window := &unix.Winsize{
		Row: clip(size.Rows), Col: clip(size.Columns), Xpixel: clip(size.Width), Ypixel: clip(size.Height),
	}
	return controlFD(f, "set terminal size", func(fd int) error {
		return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, window)
	})
}

// controlFD runs an ioctl on f, which may be closed at the same time.
func controlFD(f *os.File, what string, ioctl func(fd int) error) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	var inner error
	err = raw.Control(func(fd uintptr) { inner = ioctl(int(fd)) })
	if err := errors.Join(err, inner); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

func clip(n uint32) uint16 { return uint16(min(n, 65535)) }

// setModes applies the client's modes to what the kernel gives a new terminal.
func setModes(slave *os.File, modes []mode) error {
	if len(modes) == 0 {
		return nil
	}
	return controlFD(slave, "set terminal modes", func(fd int) error {
		t, err := unix.IoctlGetTermios(fd, getTermios)
		if err != nil {
			return err //nolint:wrapcheck // controlFD says what for
		}
		applyModes(t, modes)
		return unix.IoctlSetTermios(fd, setTermios, t)
	})
}

// applyModes changes t as modes say; what this system does not know is left.
func applyModes(t *unix.Termios, modes []mode) {
	for _, m := range modes {
		if i, ok := controlChars[m.op]; ok {
			t.Cc[i] = uint8(m.value)
			if m.value > 254 { // 255 means that there is none (RFC 4254, section 8)
				t.Cc[i] = 0
			}
			continue
		}
		flag, ok := modeFlags[m.op]
		if !ok {
			continue
		}
		field := flag.field(t)
		*field &^= flag.mask
		if m.value != 0 {
			*field |= flag.bits
		}
	}
}

func coreDumped(ws syscall.WaitStatus) bool { return ws.CoreDump() }
