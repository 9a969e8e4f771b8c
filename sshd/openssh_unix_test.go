//go:build unix

package sshd

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

const oddName = `od d'"%h ünï$x*[a]\`

func TestOpenSSHWaysIn(t *testing.T) {
	t.Parallel()
	for place, folder := range map[string]string{"plain path": "state", "odd path": oddName} {
		t.Run(place, func(t *testing.T) {
			in := newInstallation(t, filepath.Join(t.TempDir(), folder))
			in.write(t, self(t, in.state), "alpha", "beta")
			// -J hands the path of -F to a shell without quotes, so the user's file has a plain one.
			user := filepath.Join(t.TempDir(), "config")
			if change, err := Install(user, in.config); change != Changed || err != nil {
				t.Fatal(change, err)
			}
			in.config = user
			for name, args := range map[string][]string{
				"full name":             {"alpha.helix.local"},
				"companion zone":        {"alpha.helix.internal"},
				"bare name":             {"alpha"},
				"user":                  {"root@alpha.helix.local"},
				"address":               {alphaAddr},
				"address by jump host":  {"-J", "gw.helix.local", alphaAddr},
				"user of jump host":     {"alpha@gw.helix.local"},
				"jump host":             {"-J", "gw.helix.local", "alpha"},
				"jump host, full name":  {"-J", "gw.helix.local", "alpha.helix.local"},
				"no certificates":       {"-o", "HostKeyAlgorithms=ssh-ed25519", "alpha.helix.local"},
				"jump, no certificates": {"-o", "HostKeyAlgorithms=ssh-ed25519", "-J", "gw.helix.local", "alpha.helix.local"},
				"certificates only":     {"-o", "HostKeyAlgorithms=ssh-ed25519-cert-v01@openssh.com", "alpha.helix.local"},
			} {
				t.Run(name, func(t *testing.T) {
					got := in.ssh(t, nil, append(args, "echo o; echo e >&2; exit 7")...)
					if want := (result{"o\n", "e\n", 7}); got != want {
						t.Errorf("got %+v, want %+v", got, want)
					}
				})
			}
		})
	}
}

func TestOpenSSHRefusesSwappedNames(t *testing.T) {
	t.Parallel()
	in := newInstallation(t, t.TempDir())
	in.lies = map[string]string{"alpha": "beta", "beta": "alpha"}
	in.write(t, self(t, in.state), "alpha", "beta")
	for _, algorithm := range []string{"ssh-ed25519", "ssh-ed25519-cert-v01@openssh.com", "+ssh-ed25519"} {
		for _, way := range [][]string{{"alpha.helix.local"}, {"-J", "gw.helix.local", "beta"}} {
			got := in.ssh(t, nil, append([]string{"-o", "HostKeyAlgorithms=" + algorithm}, append(way, "echo reached")...)...)
			if got.code != 255 || got.out != "" || !strings.Contains(got.err, "Host key verification failed") {
				t.Errorf("%s %v: got %+v, want a failed verification", algorithm, way, got)
			}
		}
	}
}

func TestOpenSSHRefusesOtherInstallation(t *testing.T) {
	t.Parallel()
	in, other := newInstallation(t, t.TempDir()), newInstallation(t, t.TempDir())
	in.write(t, self(t, in.state), "alpha")
	other.write(t, self(t, other.state), "alpha")
	addr := []byte(other.ln.Addr().String())
	if err := os.WriteFile(filepath.Join(in.state, "addr"), addr, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := in.ssh(t, nil, "alpha.helix.local", "true"); got.code != 255 || !strings.Contains(got.err, "verification failed") {
		t.Errorf("got %+v, want a failed verification", got)
	}
}

func TestOpenSSHUnavailable(t *testing.T) {
	t.Parallel()
	in := newInstallation(t, t.TempDir())
	in.down["alpha"] = "workspace \"alpha\" is stopped\nstart it with: helix start alpha"
	in.write(t, self(t, in.state), "alpha")
	want := "helix: workspace \"alpha\" is stopped start it with: helix start alpha"
	for name, args := range map[string][]string{
		"command":   {"alpha.helix.local", "true"},
		"shell":     {"-T", "alpha"},
		"subsystem": {"-s", "alpha", "sftp"},
		"jump host": {"-J", "gw.helix.local", "alpha", "true"},
	} {
		if got := in.ssh(t, nil, args...); got != (result{"", want + "\n", 255}) {
			t.Errorf("%s: got %+v", name, got)
		}
	}
	if got := in.ssh(t, nil, "-tt", "alpha"); !strings.Contains(got.err+got.out, want+"\r\n") || got.code != 255 {
		t.Errorf("terminal: got %+v", got)
	}
	if got := in.ssh(t, nil, "-W", "localhost:80", "alpha"); !strings.Contains(got.err, "is stopped") || got.code == 0 {
		t.Errorf("forward: got %+v", got)
	}
	// A client that only forwards is let go, so that it does not keep the answer.
	if got := in.ssh(t, nil, "-N", "alpha"); got.code != 255 {
		t.Errorf("no channel: got %+v", got)
	}
}

func TestOpenSSHJumpHostAnswers(t *testing.T) {
	t.Parallel()
	in := newInstallation(t, t.TempDir())
	in.write(t, self(t, in.state), "alpha")
	for name, c := range map[string]struct {
		args []string
		want string
	}{
		"shell":      {[]string{"gw.helix.local"}, "helix: gw.helix.local is a jump host without a shell; use: ssh -J gw.helix.local NAME.helix.local\n"},
		"user":       {[]string{"nobody@gw.helix.local"}, `no workspace nobody: not found (did you mean "alpha"?); gw.helix.local is a jump host`},
		"bad user":   {[]string{"A_b@gw.helix.local", "true"}, `"A_b" is not a workspace name`},
		"unknown":    {[]string{"-J", "gw.helix.local", "nobody"}, `no workspace nobody: not found (did you mean "alpha"?)`},
		"prohibited": {[]string{"-W", "secret:80", "gw.helix.local"}, "administratively prohibited"},
		"foreign":    {[]string{"-W", "example.com:80", "gw.helix.local"}, "example.com port 80 is not a port of a workspace"},
	} {
		got := in.ssh(t, nil, c.args...)
		if got.code != 255 || got.out != "" || !strings.Contains(got.err, c.want) {
			t.Errorf("%s: got %+v, want %q", name, got, c.want)
		}
	}
}

func TestOpenSSHHalfClose(t *testing.T) {
	t.Parallel()
	in := newInstallation(t, t.TempDir())
	in.ports["alpha:7"] = func(c Conn) { // answers after the client's end
		defer c.Close()
		sum := sha256.New()
		_, _ = io.Copy(sum, c)
		fmt.Fprintf(c, "%x", sum.Sum(nil))
	}
	in.write(t, self(t, in.state), "alpha")
	for _, size := range []int{0, 1, 3 << 20} {
		data := make([]byte, size)
		_, _ = rand.Read(data)
		got := in.ssh(t, bytes.NewReader(data), "-W", "alpha.helix.local:7", "gw.helix.local")
		if want := (result{out: fmt.Sprintf("%x", sha256.Sum256(data))}); got != want {
			t.Errorf("%d bytes: got %+v, want %+v", size, got, want)
		}
		if err := <-in.ended; err != nil {
			t.Errorf("%d bytes: relay: %v", size, err)
		}
	}
}

// SSH sessions by user name carry data both ways, whole, and end with the command.
func TestOpenSSHUserRoute(t *testing.T) {
	t.Parallel()
	in := newInstallation(t, t.TempDir())
	in.lies = map[string]string{"beta": "alpha"}
	in.write(t, self(t, in.state), "alpha", "beta")
	data := make([]byte, 3<<20)
	_, _ = rand.Read(data)
	got := in.ssh(t, bytes.NewReader(data), "alpha@gw.helix.local", "cat; exit 3")
	if got.out != string(data) || got.code != 3 {
		t.Errorf("got %d bytes, %q, code %d", len(got.out), got.err, got.code)
	}
	open, hold, err := os.Pipe() // input that does not end
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = open.Close(), hold.Close() }()
	if got := in.ssh(t, open, "alpha@gw.helix.local", "echo done"); got != (result{out: "done\n"}) {
		t.Errorf("open input: %+v", got)
	}
	if got := in.ssh(t, nil, "beta@gw.helix.local", "echo reached"); got.code != 255 || !strings.Contains(got.err, "log in at workspace") {
		t.Errorf("false host: %+v", got)
	}
}

// With -L, because the client's -W stops sending when the server has ended.
func TestOpenSSHServerEndsFirst(t *testing.T) {
	t.Parallel()
	in := newInstallation(t, t.TempDir())
	count := make(chan string, 1)
	in.ports["alpha:8"] = func(c Conn) {
		defer c.Close()
		_, _ = io.WriteString(c, "first")
		_ = c.CloseWrite()
		n, err := io.Copy(io.Discard, c)
		count <- fmt.Sprint(n, err)
	}
	in.write(t, self(t, in.state), "alpha")
	folder, err := os.MkdirTemp("", "fwd") // t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(folder)
	local, control := filepath.Join(folder, "l"), filepath.Join(folder, "c")
	if got := in.ssh(t, nil, "-fN", "-M", "-S", control, "-L", local+":alpha:8", "gw.helix.local"); got.code != 0 {
		t.Fatalf("forward: %+v", got)
	}
	defer in.ssh(t, nil, "-S", control, "-O", "exit", "gw.helix.local")
	conn, err := net.Dial("unix", local)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if got, err := io.ReadAll(conn); string(got) != "first" || err != nil {
		t.Errorf("got %q, %v", got, err)
	}
	if _, err := conn.Write(make([]byte, 1<<20)); err != nil {
		t.Error(err)
	}
	if err := conn.(*net.UnixConn).CloseWrite(); err != nil {
		t.Error(err)
	}
	if got := <-count; got != "1048576 <nil>" {
		t.Errorf("the server got %s", got)
	}
	if err := <-in.ended; err != nil {
		t.Errorf("relay: %v", err)
	}
}

// A client that dies is not a client that has sent everything.
func TestOpenSSHClientKilled(t *testing.T) {
	t.Parallel()
	in := newInstallation(t, t.TempDir())
	greeted := make(chan error, 1)
	in.ports["alpha:9"] = func(c Conn) {
		defer c.Close()
		_, _ = io.WriteString(c, "hello\n")
		_, err := io.Copy(io.Discard, c)
		greeted <- err
	}
	in.write(t, self(t, in.state), "alpha")
	cmd := exec.CommandContext(t.Context(), "ssh", "-F", in.config, "-W", "alpha:9", "gw.helix.local")
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer stdin.Close()
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "hello\n" {
		t.Fatalf("got %q, %v", line, err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if err := <-greeted; err == nil {
		t.Error("the upstream saw an orderly end")
	}
	if err := <-in.ended; !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("relay ended with %v", err)
	}
}

func TestOpenSSHMultiplexed(t *testing.T) {
	t.Parallel()
	in := newInstallation(t, t.TempDir())
	in.ports["alpha:7"] = func(c Conn) {
		defer c.Close()
		_, _ = io.Copy(c, c)
	}
	in.write(t, self(t, in.state), "alpha")
	folder, err := os.MkdirTemp("", "mux") // t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(folder)
	socket := filepath.Join(folder, "s")
	if got := in.ssh(t, nil, "-M", "-S", socket, "-fN", "-o", "ControlPersist=yes", "gw.helix.local"); got.code != 0 {
		t.Fatalf("master: %+v", got)
	}
	defer in.ssh(t, nil, "-S", socket, "-O", "exit", "gw.helix.local")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	long := exec.CommandContext(ctx, "ssh", "-F", in.config, "-S", socket, "-W", "alpha:7", "gw.helix.local")
	stdin, _ := long.StdinPipe()
	stdout, _ := long.StdoutPipe()
	if err := long.Start(); err != nil {
		t.Fatal(err)
	}
	echo := func(text string) {
		t.Helper()
		_, _ = io.WriteString(stdin, text)
		if got := make([]byte, len(text)); true {
			if _, err := io.ReadFull(stdout, got); err != nil || string(got) != text {
				t.Fatalf("got %q, %v", got, err)
			}
		}
	}
	echo("before")
	for range 3 {
		if got := in.ssh(t, nil, "-S", socket, "-W", "nobody:22", "gw.helix.local"); got.code == 0 {
			t.Errorf("unknown workspace: %+v", got)
		}
		if got := in.ssh(t, nil, "-S", socket, "gw.helix.local", "true"); got.code != 255 || got.out != "" {
			t.Errorf("command: %+v", got)
		}
		echo("after")
	}
	_ = stdin.Close()
	if err := long.Wait(); err != nil {
		t.Error(err)
	}
}

// A user who may log in is not the installation's own client.
func TestOpenSSHAuthorizedUser(t *testing.T) {
	t.Parallel()
	in := newInstallation(t, t.TempDir())
	in.write(t, self(t, in.state), "alpha")
	key := filepath.Join(t.TempDir(), "id")
	if out, err := exec.CommandContext(t.Context(), "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "me", "-f", key).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	args := []string{"-i", key, "-o", "IdentitiesOnly=yes", "-F", "none", "-o", "StrictHostKeyChecking=yes", "-o", "BatchMode=yes", "-o", "CheckHostIP=no"}
	ctx, cancel := context.WithCancel(t.Context())
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- in.server.Serve(ctx, ln) }()
	host, port, _ := net.SplitHostPort(ln.Addr().String())
	args = append(args, "-o", "UserKnownHostsFile="+filepath.Join(in.state, "ssh", "known_hosts"), "-o", "HostKeyAlias=gw.helix.local", "-p", port, host)
	if got := in.ssh(t, nil, args...); !strings.Contains(got.err, "Permission denied (publickey)") {
		t.Errorf("stranger: %+v", got)
	}
	if added, err := in.auth.AddFile(key + ".pub"); err != nil || len(added) != 1 {
		t.Fatalf("add: %v, %v", added, err)
	}
	if got := in.ssh(t, nil, args...); !strings.Contains(got.err, "is a jump host without a shell") {
		t.Errorf("user: %+v", got)
	}
	cancel()
	if err := <-served; err != nil {
		t.Error(err)
	}
}
