package session

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"syscall"

	"helix.local/helix/agent/process"
)

const copyBuffer = 32 << 10 // the largest data message of x/crypto/ssh

// program is a running command, shell or sftp server with our ends of its
// standard streams.
type program struct {
	child  *process.Child
	stdin  *os.File
	stdout *os.File
	stderr *os.File // nil under a terminal: there it is stdout
	tty    *os.File // the terminal's master; stdin and stdout are it too

	ended chan struct{} // closed when end is valid
	end   error         // of exec.Cmd.Wait
}

// startPiped starts cmd with three pipes.
func (s *Server) startPiped(cmd *exec.Cmd) (p *program, err error) {
	var files []*os.File
	defer func() {
		for _, f := range files {
			_ = f.Close() // ours only on failure, the child's ends always
		}
	}()
	var ours, theirs [3]*os.File
	for i := range 3 {
		r, w, err := os.Pipe()
		if err != nil {
			return nil, err //nolint:wrapcheck // names the call
		}
		files = append(files, r, w)
		if i == 0 {
			ours[i], theirs[i] = w, r
		} else {
			ours[i], theirs[i] = r, w
		}
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = theirs[0], theirs[1], theirs[2]
	child, err := s.cfg.Reaper.Start(cmd)
	if err != nil {
		return nil, err //nolint:wrapcheck // names the program
	}
	files = theirs[:]
	p = &program{child: child, stdin: ours[0], stdout: ours[1], stderr: ours[2], ended: make(chan struct{})}
	s.track(p)
	return p, nil
}

// closeStreams closes our ends. Copies that are blocked on them return.
func (p *program) closeStreams() {
	for _, f := range []*os.File{p.stdin, p.stdout, p.stderr, p.tty} {
		if f != nil {
			_ = f.Close() // may be closed already
		}
	}
}

// alive reports whether the program has not been reaped yet.
func (p *program) alive() bool {
	select {
	case <-p.ended:
		return false
	default:
		return true
	}
}

// result is how the program ended, once it has: the name of the signal that
// killed it, or its status.
func (p *program) result() (status uint32, signal string, core bool) {
	if p.end == nil {
		return 0, "", false
	}
	exit, ok := errors.AsType[*exec.ExitError](p.end)
	if !ok {
		return 255, "", false
	}
	if ws, ok := exit.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return 0, signalName(ws.Signal()), coreDumped(ws)
	}
	return uint32(exit.ExitCode()), "", false
}

// copyOut copies until the program's side ends. The terminal's master says EIO
// for that.
func copyOut(dst io.Writer, src *os.File) {
	// A write error means that the client is gone; the channel's end says so too.
	_, _ = io.CopyBuffer(struct{ io.Writer }{dst}, struct{ io.Reader }{src}, make([]byte, copyBuffer))
}
