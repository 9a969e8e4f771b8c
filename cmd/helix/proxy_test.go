//go:build unix

package main

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func itoa(n int) string { return strconv.Itoa(n) }

// unixPair is a connection and its other end.
func unixPair(t *testing.T) (near, far *net.UnixConn) {
	t.Helper()
	ln, err := net.Listen("unix", filepath.Join(shortDir(t), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	c, err := net.Dial("unix", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	s, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = c.Close(), s.Close() }) // for the second time in most tests
	return c.(*net.UnixConn), s.(*net.UnixConn)
}

func TestJoinStdio(t *testing.T) {
	big := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	for name, c := range map[string]struct {
		peer func(t *testing.T, far *net.UnixConn, stdin io.WriteCloser)
		out  []byte
		err  error
	}{
		"client ends first": {func(t *testing.T, far *net.UnixConn, stdin io.WriteCloser) {
			go func() { _, _ = stdin.Write(big); _ = stdin.Close() }()
			got, err := io.ReadAll(far)
			if err != nil || !bytes.Equal(got, big) {
				t.Errorf("server read %d bytes, %v", len(got), err)
			}
			_, _ = far.Write([]byte("sum"))
			_ = far.Close()
		}, []byte("sum"), nil},
		"server ends first": {func(t *testing.T, far *net.UnixConn, stdin io.WriteCloser) {
			_, _ = far.Write([]byte("early"))
			_ = far.CloseWrite()
			go func() { _, _ = stdin.Write(big); _ = stdin.Close() }()
			if got, err := io.ReadAll(far); err != nil || !bytes.Equal(got, big) {
				t.Errorf("server read %d bytes, %v", len(got), err)
			}
			_ = far.Close()
		}, []byte("early"), nil},
		"nothing at all": {func(_ *testing.T, far *net.UnixConn, stdin io.WriteCloser) {
			_ = stdin.Close()
			_, _ = far.Read(make([]byte, 1))
			_ = far.Close()
		}, nil, nil},
		"cut": {func(_ *testing.T, far *net.UnixConn, _ io.WriteCloser) {
			_, _ = far.Write([]byte("part"))
			_ = far.Close()
		}, []byte("part"), errCut},
		"cut after the server's end": {func(_ *testing.T, far *net.UnixConn, _ io.WriteCloser) {
			_, _ = far.Write([]byte("all"))
			_ = far.CloseWrite()
			_ = far.Close()
		}, []byte("all"), errCut},
	} {
		t.Run(name, func(t *testing.T) {
			near, far := unixPair(t)
			in, stdin, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			defer in.Close()
			defer stdin.Close()
			back, stdout, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			defer back.Close()
			joined := make(chan error)
			go func() { joined <- joinStdio(t.Context(), near, in, stdout) }()
			read := make(chan []byte)
			go func() {
				got, _ := io.ReadAll(back) // what came until then is compared
				read <- got
			}()
			c.peer(t, far, stdin)
			if err := <-joined; !errors.Is(err, c.err) {
				t.Errorf("got %v, want %v", err, c.err)
			}
			_ = stdout.Close() // it is closed already unless the connection was cut
			if got := <-read; !bytes.Equal(got, c.out) {
				t.Errorf("standard output got %q, want %q", got, c.out)
			}
		})
	}
}

func TestProxy(t *testing.T) {
	f := newFake(t)
	f.put("demo", "dir", stateRunning)
	f.echoed = func(c net.Conn) {
		_, _ = io.Copy(c, c)
		_ = c.(*net.UnixConn).CloseWrite()
	}
	f.listen(t)
	got := call{state: f.state, stdin: "to and fro"}.run(t.Context(), "proxy", "demo.helix.local", "80")
	if got.code != 0 || got.stdout != "to and fro" {
		t.Errorf("got %+v", got)
	}
	got = call{state: f.state}.run(t.Context(), "proxy", "demo", "1")
	if got.code != exitOther || got.stderr != "helix: nothing listens on port 1 of demo\n" {
		t.Errorf("refused: got %+v", got)
	}
	got = call{state: f.state}.run(t.Context(), "proxy", "--pass-fd", "demo", "80")
	if got.code != exitOther || !strings.Contains(got.stderr, "leave out --pass-fd") {
		t.Errorf("no socket: got %+v", got)
	}
}

func TestPassDescriptor(t *testing.T) {
	f := newFake(t)
	f.echoed = func(c net.Conn) { _, _ = io.Copy(c, c) }
	f.listen(t)
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "ours"), os.NewFile(uintptr(pair[1]), "theirs")
	defer ours.Close()
	a := &app{stdout: theirs, stderr: io.Discard, getenv: func(string) string { return f.state }}
	if code := a.run(t.Context(), []string{"proxy", "demo", "80", "--pass-fd"}); code != 0 {
		t.Fatalf("exit code %d", code)
	}
	if err := theirs.Close(); err != nil {
		t.Fatal(err)
	}
	one, rights := make([]byte, 2), make([]byte, unix.CmsgSpace(4))
	n, rn, _, _, err := unix.Recvmsg(int(ours.Fd()), one, rights, 0)
	if err != nil || n != 1 {
		t.Fatalf("received %d bytes, %v", n, err)
	}
	messages, err := unix.ParseSocketControlMessage(rights[:rn])
	if err != nil {
		t.Fatal(err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		t.Fatalf("received %v, %v", fds, err)
	}
	file := os.NewFile(uintptr(fds[0]), "conn")
	conn, err := net.FileConn(file)
	if err := errors.Join(err, file.Close()); err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write([]byte("ping")); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(io.LimitReader(conn, 4)); err != nil || string(got) != "ping" {
		t.Errorf("echo %q, %v", got, err)
	}
	if n, err := syscall.Read(pair[0], one); n != 0 || err != nil {
		t.Errorf("more than one byte came: %d, %v", n, err)
	}
}
