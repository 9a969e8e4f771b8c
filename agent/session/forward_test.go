//go:build linux || darwin

package session

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	gossh "golang.org/x/crypto/ssh"
)

// checksumServer answers the SHA-256 of what it got after the client's half-close.
func checksumServer(t *testing.T, network, address string) net.Listener {
	t.Helper()
	ln, err := net.Listen(network, address)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			h := sha256.New()
			if _, err := io.Copy(h, c); err == nil {
				_, _ = fmt.Fprintf(c, "%x", h.Sum(nil))
			}
			_ = c.Close()
		}
	}()
	t.Cleanup(func() { _ = ln.Close(); <-done })
	return ln
}

// askChecksum sends data, half-closes, and wants the checksum.
func askChecksum(t *testing.T, network, address string, data []byte) {
	t.Helper()
	c, err := net.Dial(network, address)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close() //nolint:errcheck // read to its end
	if _, err := c.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := c.(closeWriter).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(c)
	if want := fmt.Sprintf("%x", sha256.Sum256(data)); err != nil || string(got) != want {
		t.Errorf("got %q, %v; want %s", got, err, want)
	}
}

// background runs ssh -N with args until the test ends and returns when the
// control master answers, which is after the forwards are up.
func (tg *target) background(args ...string) {
	tg.t.Helper()
	control := filepath.Join(tg.files, "c")
	cmd := tg.command("ssh", append([]string{"-N", "-M", "-S", control}, append(args, "ws")...)...)
	var stderr safeBuffer
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		tg.t.Fatal(err)
	}
	exited := make(chan struct{})
	go func() { _ = cmd.Wait(); close(exited) }() // killed below
	tg.t.Cleanup(func() {
		_ = cmd.Process.Kill() // may have ended
		<-exited
	})
	waitFor(tg.t, func() bool {
		select {
		case <-exited:
			tg.t.Fatalf("ssh ended: %s", stderr.String())
		default:
		}
		return exec.Command("ssh", "-F", tg.file("config"), "-S", control, "-O", "check", "ws").Run() == nil
	})
}

func freePort(t *testing.T) int {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close() //nolint:errcheck // only its number is used
	return ln.Addr().(*net.TCPAddr).Port
}

func TestForwards(t *testing.T) {
	t.Parallel()
	tg := startTarget(t, own(t))
	dir := t.TempDir()
	tcp := checksumServer(t, "tcp", "127.0.0.1:0").Addr().String()
	unixServer := filepath.Join(dir, "server")
	checksumServer(t, "unix", unixServer)
	local, remote, socks, remoteSocket := freePort(t), freePort(t), freePort(t), filepath.Join(dir, "remote")
	localSocket := filepath.Join(dir, "local")
	tg.background("-L", fmt.Sprintf("%d:%s", local, tcp), "-R", fmt.Sprintf("%d:%s", remote, tcp), "-D", fmt.Sprint(socks),
		"-L", localSocket+":"+unixServer, "-R", remoteSocket+":"+unixServer)
	waitFor(t, func() bool { // the client asks for these after its control socket is up
		_, err := os.Stat(remoteSocket)
		c, dialErr := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", remote))
		return dialErr == nil && c.Close() == nil && err == nil
	})
	data := randomBytes(t, 3<<20)
	for name, at := range map[string][2]string{
		"-L":        {"tcp", fmt.Sprintf("127.0.0.1:%d", local)},
		"-R":        {"tcp", fmt.Sprintf("127.0.0.1:%d", remote)},
		"-L socket": {"unix", localSocket},
		"-R socket": {"unix", remoteSocket},
	} {
		t.Run(name, func(t *testing.T) {
			askChecksum(t, at[0], at[1], data)
			askChecksum(t, at[0], at[1], nil)
		})
	}
	if info, err := os.Stat(remoteSocket); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("remote socket: %v, %v", info, err)
	}
	t.Run("-W", func(t *testing.T) {
		got, _, code := tg.ssh("12345", "-W", tcp, "ws")
		if want := fmt.Sprintf("%x", sha256.Sum256([]byte("12345"))); got != want || code != 0 {
			t.Errorf("got %q, code %d", got, code)
		}
	})
	t.Run("-D", func(t *testing.T) {
		c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", socks))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close() //nolint:errcheck // read to its end
		port := checksumPort(t, tcp)
		if _, err := c.Write(append([]byte{5, 1, 0, 5, 1, 0, 1, 127, 0, 0, 1}, byte(port>>8), byte(port))); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, make([]byte, 12)); err != nil {
			t.Fatal(err)
		}
		if err := c.(closeWriter).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(c); err != nil || string(got) != fmt.Sprintf("%x", sha256.Sum256(nil)) {
			t.Errorf("got %q, %v", got, err)
		}
	})
}

func checksumPort(t *testing.T, address string) int {
	t.Helper()
	addr, err := net.ResolveTCPAddr("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	return addr.Port
}

// Two connections may ask for the same forward name; port 0 is chosen by the
// target; what was cancelled is free at once.
func TestRemoteForwardLife(t *testing.T) {
	t.Parallel()
	tg := startTarget(t, own(t))
	first, second := tg.dial(), tg.dial()
	a, err := first.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b, err := second.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := second.Listen("tcp", a.Addr().String()); err == nil {
		t.Error("port taken by the first connection was given to the second")
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool { // freed with its connection
		c, err := second.Listen("tcp", a.Addr().String())
		return err == nil && c.Close() == nil
	})
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if c, err := net.Dial("tcp", b.Addr().String()); err == nil {
		_ = c.Close()
		t.Error("cancelled forward still accepts")
	}
}

func TestBindAddress(t *testing.T) {
	t.Parallel()
	for host, want := range map[string]string{
		"": "127.0.0.1", "localhost": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "127.0.0.1", "*": "127.0.0.1",
		"127.0.0.9": "127.0.0.9", "::1": "::1", "192.168.1.4": "127.0.0.1",
	} {
		if got := bindAddress(host).String(); got != want {
			t.Errorf("bindAddress(%q) = %s, want %s", host, got, want)
		}
	}
}

// Nothing listens: the client hears it at the channel, before any byte.
func TestDirectRefused(t *testing.T) {
	t.Parallel()
	client := startTarget(t, own(t)).dial()
	_, err := client.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", freePort(t)))
	if refused, ok := err.(*gossh.OpenChannelError); !ok || refused.Reason != gossh.ConnectionFailed || !strings.Contains(refused.Message, "refused") {
		t.Errorf("got %v, want a refused channel", err)
	}
	if _, err := client.Dial("unix", "/no/such/socket"); err == nil {
		t.Error("channel to a socket that is not there was opened")
	}
}

// A dead SSH connection must not look like the end of an upload.
func TestDeathResetsUpstream(t *testing.T) {
	t.Parallel()
	tg := startTarget(t, own(t))
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close() //nolint:errcheck // test's own
	client := tg.dial()
	c, err := client.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	upstream, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer upstream.Close() //nolint:errcheck // test's own
	if _, err := c.Write([]byte("half of it")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(upstream, make([]byte, 10)); err != nil {
		t.Fatal(err)
	}
	if err := client.Close(); err != nil {
		t.Fatal(err)
	}
	if err := upstream.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if n, err := upstream.Read(make([]byte, 1)); err == nil || err == io.EOF {
		t.Errorf("upstream read %d, %v; want a reset", n, err)
	}
}

func TestAgentForwarding(t *testing.T) {
	t.Parallel()
	tg := startTarget(t, own(t))
	socket := tg.file("agent")
	agent := exec.Command("ssh-agent", "-D", "-a", socket)
	if err := agent.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = agent.Process.Kill() // ours
		_ = agent.Wait()
	})
	waitFor(t, func() bool { _, err := os.Stat(socket); return err == nil })
	add := exec.Command("ssh-add", "-q", tg.file("id"))
	add.Env = append(os.Environ(), "SSH_AUTH_SOCK="+socket)
	if out, err := add.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	cmd := tg.command("ssh", "-A", "-o", "IdentityAgent="+socket, "ws", "ssh-add -l; ls -ld $(dirname $SSH_AUTH_SOCK) | cut -c1-10; echo $SSH_AUTH_SOCK")
	out, stderr, code := result(t, cmd, "")
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if code != 0 || len(lines) != 3 || !strings.Contains(lines[0], "ED25519") || lines[1] != "drwx------" {
		t.Fatalf("code %d: %q %q", code, out, stderr)
	}
	waitFor(t, func() bool { _, err := os.Stat(lines[2]); return os.IsNotExist(err) })
	if out := tg.must("ws", "echo -$SSH_AUTH_SOCK-"); out != "--\n" {
		t.Errorf("without -A: %q", out)
	}
}

func TestControlMaster(t *testing.T) {
	t.Parallel()
	tg := startTarget(t, own(t))
	tg.background()
	type outcome struct {
		out  []byte
		code int
	}
	outcomes := make(chan outcome, 10)
	for i := range 10 {
		go func() {
			cmd := exec.Command("ssh", "-F", tg.file("config"), "-S", tg.file("c"), "ws", fmt.Sprintf("cat; exit %d", i))
			cmd.Stdin = bytes.NewReader(bytes.Repeat([]byte{byte('0' + i)}, 100_000))
			out, _ := cmd.Output() // the code says it
			outcomes <- outcome{out, cmd.ProcessState.ExitCode()}
		}()
	}
	for range 10 {
		o := <-outcomes
		if want := bytes.Repeat([]byte{byte('0' + o.code)}, 100_000); !bytes.Equal(o.out, want) {
			t.Errorf("session with code %d: %d bytes, want %d", o.code, len(o.out), len(want))
		}
	}
}
