//go:build linux || darwin

package session

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	gossh "golang.org/x/crypto/ssh"

	"helix.local/helix/agent/wire"
)

// A client that counts missing keepalive answers stays.
func TestKeepalive(t *testing.T) {
	t.Parallel()
	tg := startTarget(t, own(t))
	if got := tg.must("-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=1", "ws", "sleep 3; echo alive"); got != "alive\n" {
		t.Errorf("got %q", got)
	}
}

// New keys hold for new connections; those that are open go on.
func TestIdentityReplaced(t *testing.T) {
	t.Parallel()
	tg := startTarget(t, own(t))
	before := tg.dial()
	_, host := newKey(t)
	if err := tg.SetIdentity(wire.Identity{HostKey: wire.Secret(host), Authorized: []string{read(t, tg.file("wrong.pub"))}}); err != nil {
		t.Fatal(err)
	}
	s, err := before.NewSession()
	if err != nil {
		t.Fatal(err)
	}
	if out, err := s.Output("echo on"); err != nil || string(out) != "on\n" {
		t.Errorf("open connection: %q, %v", out, err)
	}
	if _, stderr, code := tg.ssh("", "ws", "true"); code != 255 || !strings.Contains(stderr, "Host key verification failed") {
		t.Errorf("old host key expected: code %d, %s", code, stderr)
	}
	if _, stderr, code := tg.ssh("", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "ws", "true"); code != 255 || !strings.Contains(stderr, "Permission denied") {
		t.Errorf("withdrawn key: code %d, %s", code, stderr)
	}
}

// Keys typed at a terminal act as keys do.
func TestTypedInterrupt(t *testing.T) {
	t.Parallel()
	tg := startTarget(t, own(t))
	s, err := tg.dial().NewSession()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.RequestPty("vt100", 24, 80, nil); err != nil {
		t.Fatal(err)
	}
	in, err := s.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := s.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Start("trap 'exit 130' INT; echo ready; while :; do sleep 0.05; done"); err != nil {
		t.Fatal(err)
	}
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	if _, err := in.Write([]byte{3}); err != nil {
		t.Fatal(err)
	}
	exit, ok := s.Wait().(*gossh.ExitError)
	if !ok || exit.ExitStatus() != 130 {
		t.Errorf("got %v, want status 130", exit)
	}
}

// Close ends what its clients left, also what does not listen to SIGHUP.
func TestCloseEndsPrograms(t *testing.T) {
	t.Parallel()
	tg := startTarget(t, own(t))
	client := tg.dial()
	s, err := client.NewSession()
	if err != nil {
		t.Fatal(err)
	}
	out, err := s.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Start("trap '' HUP; echo $$; exec 1>&-; while :; do sleep 0.05; done"); err != nil {
		t.Fatal(err)
	}
	var pid int
	if _, err := fmt.Fscan(out, &pid); err != nil {
		t.Fatal(err)
	}
	if err := client.Close(); err != nil {
		t.Fatal(err)
	}
	if err := tg.Close(100 * time.Millisecond); err != nil {
		t.Error(err)
	}
	if err := syscall.Kill(pid, 0); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("process %d: %v, want it gone", pid, err)
	}
}

// upstream accepts one connection through a direct-tcpip channel.
func upstream(t *testing.T, client *gossh.Client) (channel net.Conn, served *net.TCPConn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close() //nolint:errcheck // one connection only
	channel, err = client.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	accepted, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = accepted.Close() }) // may be closed already
	return channel, accepted.(*net.TCPConn)
}

// The server finishes first while the client still sends: nothing is cut.
func TestServerClosesFirst(t *testing.T) {
	t.Parallel()
	channel, served := upstream(t, startTarget(t, own(t)).dial())
	if _, err := served.Write([]byte("bye")); err != nil {
		t.Fatal(err)
	}
	if err := served.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(channel); err != nil || string(got) != "bye" {
		t.Errorf("client read %q, %v", got, err)
	}
	data := randomBytes(t, 1<<20)
	sent := make(chan error, 1)
	go func() {
		_, err := channel.Write(data)
		sent <- errors.Join(err, channel.(interface{ CloseWrite() error }).CloseWrite())
	}()
	got, err := io.ReadAll(served)
	if err != nil || !bytes.Equal(got, data) {
		t.Errorf("server read %d bytes, %v; want %d", len(got), err, len(data))
	}
	if err := <-sent; err != nil {
		t.Error(err)
	}
}

// A client that closes its channel at once still delivers what it wrote.
func TestWriteThenClose(t *testing.T) {
	t.Parallel()
	channel, served := upstream(t, startTarget(t, own(t)).dial())
	if _, err := channel.Write([]byte("all of it")); err != nil {
		t.Fatal(err)
	}
	if err := channel.Close(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(served); err != nil || string(got) != "all of it" {
		t.Errorf("server read %q, %v", got, err)
	}
}

// A reset of the service ends the channel, and only that.
func TestUpstreamReset(t *testing.T) {
	t.Parallel()
	client := startTarget(t, own(t)).dial()
	channel, served := upstream(t, client)
	if err := errors.Join(served.SetLinger(0), served.Close()); err != nil {
		t.Fatal(err)
	}
	if n, err := channel.Read(make([]byte, 1)); n != 0 || err == nil {
		t.Errorf("read %d, %v", n, err)
	}
	s, err := client.NewSession()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Run("true"); err != nil {
		t.Errorf("connection after the reset: %v", err)
	}
}

// A dead connection is no end of input: the command must not take what came so
// far for all of it.
func TestDeathIsNoEndOfInput(t *testing.T) {
	t.Parallel()
	tg := startTarget(t, own(t))
	client := tg.dial()
	s, err := client.NewSession()
	if err != nil {
		t.Fatal(err)
	}
	in, err := s.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := s.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Start("head -c 4; cat > part && mv part whole"); err != nil {
		t.Fatal(err)
	}
	if _, err := in.Write([]byte("go\n\n")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(out, make([]byte, 4)); err != nil {
		t.Fatal(err)
	}
	if err := client.Close(); err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool {
		tg.mu.Lock()
		defer tg.mu.Unlock()
		return len(tg.running) == 0
	})
	if _, err := os.Stat(filepath.Join(tg.home, "whole")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a cut upload was taken for whole: %v", err)
	}
}

func TestVersionLines(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ sent, want string }{
		"too long": {strings.Repeat("x", 300), "line too long"},
		"cut":      {"SSH-2.0-x", "EOF"},
	} {
		ours, theirs := net.Pipe()
		go func() {
			_, _ = io.ReadFull(ours, make([]byte, len(serverVersion)+2)) // the peer may have gone
			_, _ = io.WriteString(ours, c.sent)
			_ = ours.Close()
		}()
		_, _, err := peekVersion(theirs)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
		_ = theirs.Close() // the test's own
	}
}
