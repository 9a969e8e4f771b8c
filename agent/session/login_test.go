//go:build linux || darwin

package session

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	gossh "golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/agent"

	"helix.local/helix/agent/wire"
)

func TestLogin(t *testing.T) {
	t.Parallel()
	tg := startTarget(t, own(t))
	t.Run("wrong key", func(t *testing.T) {
		config := strings.ReplaceAll(read(t, tg.file("config")), tg.file("id"), tg.file("wrong"))
		write(t, tg.file("wrong-config"), config)
		_, stderr, code := result(t, exec.Command("ssh", "-F", tg.file("wrong-config"), "ws", "true"), "")
		if code != 255 || !strings.Contains(stderr, "Permission denied (publickey)") {
			t.Errorf("code %d: %s", code, stderr)
		}
	})
	t.Run("no key", func(t *testing.T) {
		client, err := gossh.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", tg.port), &gossh.ClientConfig{
			User: "x", HostKeyCallback: gossh.InsecureIgnoreHostKey(), //nolint:gosec // the test's own server
		})
		if err == nil {
			t.Errorf("logged in without a key: %v", client.Close())
		}
	})
	t.Run("plain host key", func(t *testing.T) {
		tg.must("-o", "HostKeyAlgorithms=ssh-ed25519", "-o", "UserKnownHostsFile="+tg.file("known-plain"), "ws", "true")
	})
	t.Run("weak cipher", func(t *testing.T) {
		_, _, code := tg.ssh("", "-c", "3des-cbc", "ws", "true")
		if code != 255 {
			t.Errorf("code %d", code)
		}
	})
	t.Run("any user name", func(t *testing.T) {
		if out := tg.must("-l", "whoever", "ws", "echo $USER"); out != "tester\n" {
			t.Errorf("got %q", out)
		}
	})
}

// The right key is the last of many that a client has.
func TestManyKeys(t *testing.T) {
	t.Parallel()
	tg := startTarget(t, own(t))
	keys := agent.NewKeyring()
	for range 12 {
		key, _ := newKey(t)
		if err := keys.Add(agent.AddedKey{PrivateKey: key}); err != nil {
			t.Fatal(err)
		}
	}
	right, err := gossh.ParseRawPrivateKey([]byte(read(t, tg.file("id"))))
	if err != nil {
		t.Fatal(err)
	}
	if err := keys.Add(agent.AddedKey{PrivateKey: right}); err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("unix", tg.file("keys"))
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan struct{})
	go func() {
		defer close(served)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			_ = agent.ServeAgent(keys, c) // ends with the client
			_ = c.Close()
		}
	}()
	t.Cleanup(func() { _ = ln.Close(); <-served })
	tg.must("-o", "IdentityAgent="+tg.file("keys"), "-o", "IdentitiesOnly=no", "-o", "IdentityFile="+tg.file("wrong"), "ws", "true")
}

// liar offers the public half of one key and signs with another.
type liar struct {
	gossh.Signer
	shown gossh.PublicKey
}

func (l liar) PublicKey() gossh.PublicKey { return l.shown }

// An authorized key that a client shows but does not own opens nothing, and
// neither does asking about it before logging in with another (CVE-2024-45337).
func TestShownKeyIsNotOwnedKey(t *testing.T) {
	t.Parallel()
	tg := startTarget(t, own(t))
	authorized, _, _, _, err := gossh.ParseAuthorizedKey([]byte(read(t, tg.file("id.pub"))))
	if err != nil {
		t.Fatal(err)
	}
	wrong, err := gossh.ParsePrivateKey([]byte(read(t, tg.file("wrong"))))
	if err != nil {
		t.Fatal(err)
	}
	_, err = gossh.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", tg.port), &gossh.ClientConfig{
		User: "x", Auth: []gossh.AuthMethod{gossh.PublicKeys(liar{wrong, authorized}, wrong)},
		HostKeyCallback: gossh.InsecureIgnoreHostKey(), //nolint:gosec // the test's own server
	})
	if err == nil {
		t.Error("logged in without owning an authorized key")
	}
}

func TestIdentity(t *testing.T) {
	t.Parallel()
	s, err := New(Config{Accounts: func(string) (Account, error) { return Account{}, ErrNoAccount }})
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs := net.Pipe()
	if err := s.ServeConn(t.Context(), theirs); err == nil || !strings.Contains(err.Error(), "identity not set") {
		t.Errorf("before the identity: %v", err)
	}
	if _, err := ours.Read(make([]byte, 1)); err == nil {
		t.Error("connection without identity was not closed")
	}
	_, host := newKey(t)
	_, other := newKey(t)
	for name, bad := range map[string]wire.Identity{
		"no key":             {},
		"not a key":          {HostKey: "SECRET"},
		"not a certificate":  {HostKey: wire.Secret(host), HostCert: public(t, other)},
		"broken certificate": {HostKey: wire.Secret(host), HostCert: "x"},
	} {
		if err := s.SetIdentity(bad); err == nil || strings.Contains(err.Error(), "SECRET") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if s.Ready() {
		t.Error("ready after bad identities")
	}
	good := public(t, other)
	if err := s.SetIdentity(wire.Identity{HostKey: wire.Secret(host), Authorized: []string{"nonsense", `command="x" ` + good, "# note\n" + good, ""}}); err != nil {
		t.Fatal(err)
	}
	if n := len(s.identity.Load().authorized); n != 1 || !s.Ready() {
		t.Errorf("%d keys authorized, want 1", n)
	}
	if _, err := New(Config{}); err == nil {
		t.Error("New without Accounts")
	}
}

func public(t *testing.T, private string) string {
	t.Helper()
	signer, err := gossh.ParsePrivateKey([]byte(private))
	if err != nil {
		t.Fatal(err)
	}
	return string(gossh.MarshalAuthorizedKey(signer.PublicKey()))
}

// The server answers each account as that account: processes, files, sockets,
// terminals.
func TestOtherAccount(t *testing.T) {
	if os.Geteuid() != 0 {
		return // only root can become somebody else; the rest is tested above
	}
	t.Parallel()
	base, err := os.MkdirTemp("", "helix-session-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(base); err != nil {
			t.Error(err)
		}
	})
	a := Account{Name: "helix", UID: 54321, GID: 54322, Groups: []uint32{54323}, Home: filepath.Join(base, "home"), Shell: "/bin/sh"}
	if err := os.Chmod(base, 0o755); err != nil { //nolint:gosec // others must reach the home
		t.Fatal(err)
	}
	if err := os.Mkdir(a.Home, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(a.Home, int(a.UID), int(a.GID)); err != nil {
		t.Fatal(err)
	}
	tg := startTarget(t, a)
	if out := tg.must("ws", "id -u; id -g; id -G; pwd"); out != "54321\n54322\n54322 54323\n"+a.Home+"\n" {
		t.Errorf("id: %q", out)
	}
	if out, stderr, code := tg.ssh("", "-tt", "ws", "stat -c %u-%a $SSH_TTY"); strings.TrimSpace(out) != "54321-620" {
		t.Errorf("terminal: %q %q %d", out, stderr, code)
	}
	write(t, tg.file("data"), "abc")
	write(t, filepath.Join(base, "secret"), "root's")
	out, stderr, code := result(t, tg.command("sftp", "-b", "-", "ws"), "put "+tg.file("data")+" file\n-get ../secret "+tg.file("stolen")+"\n")
	info, err := os.Stat(filepath.Join(a.Home, "file"))
	if code != 0 || err != nil {
		t.Fatalf("sftp: %d, %v\n%s%s", code, err, out, stderr)
	}
	if got := ownerOf(info); got != 54321 {
		t.Errorf("file of uid %d", got)
	}
	if _, err := os.Stat(tg.file("stolen")); err == nil {
		t.Error("sftp read root's file")
	}
	tg.background("-R", filepath.Join(a.Home, "socket")+":/nowhere")
	waitFor(t, func() bool { // it is made first and handed over then
		info, err := os.Stat(filepath.Join(a.Home, "socket"))
		return err == nil && ownerOf(info) == 54321 && info.Mode().Perm() == 0o600
	})
}
