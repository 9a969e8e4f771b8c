//go:build linux || darwin

package session

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	gossh "golang.org/x/crypto/ssh"

	"helix.local/helix/agent/wire"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == "sftp-server" {
		if err := ServeSFTP(stdio{os.Stdin, os.Stdout}, "."); err != nil {
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

type stdio struct {
	io.Reader
	io.WriteCloser
}

// target is a served Server with a client's files.
type target struct {
	*Server
	t     *testing.T
	port  int
	home  string // the account's home
	files string // keys and configuration of the client
	log   *safeBuffer
}

type safeBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *safeBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *safeBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// own is the account that runs the test, at home in a folder of its own.
func own(t *testing.T) Account {
	t.Helper()
	return Account{
		Name: "tester", UID: uint32(os.Geteuid()), GID: uint32(os.Getegid()),
		Home: t.TempDir(), Shell: "/bin/sh", Own: true,
	}
}

func startTarget(t *testing.T, account Account) *target {
	t.Helper()
	tg := &target{t: t, home: account.Home, files: t.TempDir(), log: &safeBuffer{}}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if !account.Own { // the test's program lies where only we may go
		exe = filepath.Join(account.Home, "..", "helper")
		program, err := os.ReadFile("/proc/self/exe")
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(exe, program, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	tg.Server, err = New(Config{
		Accounts:   func(string) (Account, error) { return account, nil },
		Env:        []string{"PATH=" + os.Getenv("PATH"), "BASE=1"},
		SFTPServer: []string{exe, "sftp-server"},
		Log:        slog.New(slog.NewTextHandler(tg.log, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	tg.serve()
	return tg
}

// serve accepts on loopback and gives the server keys and a client that fits.
func (tg *target) serve() {
	t := tg.t
	t.Helper()
	for _, name := range []string{"id", "wrong", "host", "ca"} {
		run(t, "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tg.file(name))
	}
	run(t, "ssh-keygen", "-q", "-s", tg.file("ca"), "-h", "-I", "ws", "-n", "ws.helix.local", tg.file("host.pub"))
	if err := tg.SetIdentity(wire.Identity{
		HostKey:    wire.Secret(read(t, tg.file("host"))),
		HostCert:   read(t, tg.file("host-cert.pub")),
		Authorized: []string{read(t, tg.file("id.pub"))},
	}); err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	tg.port = ln.Addr().(*net.TCPAddr).Port
	write(t, tg.file("known"), "@cert-authority *.helix.local "+read(t, tg.file("ca.pub")))
	write(t, tg.file("known-plain"), "ws.helix.local "+read(t, tg.file("host.pub")))
	write(t, tg.file("config"), fmt.Sprintf(`Host *
  HostName 127.0.0.1
  HostKeyAlias ws.helix.local
  Port %d
  User someone
  IdentityFile %s
  IdentitiesOnly yes
  IdentityAgent none
  UserKnownHostsFile %s
  StrictHostKeyChecking yes
  ExitOnForwardFailure yes
  BatchMode yes
  LogLevel ERROR
`, tg.port, tg.file("id"), tg.file("known")))
	ctx, cancel := context.WithCancel(context.Background())
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			nc, err := ln.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				if err := tg.ServeConn(ctx, nc); err != nil {
					_, _ = fmt.Fprintln(tg.log, err)
				}
			})
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		cancel()
		serving.Wait()
		if err := tg.Close(100 * time.Millisecond); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Log(tg.log)
		}
	})
}

func (tg *target) file(name string) string { return filepath.Join(tg.files, name) }

// command prepares an OpenSSH program with the target's configuration.
func (tg *target) command(program string, args ...string) *exec.Cmd {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	tg.t.Cleanup(cancel)
	return exec.CommandContext(ctx, program, append([]string{"-F", tg.file("config")}, args...)...)
}

// ssh runs the client and returns stdout, stderr and its exit code.
func (tg *target) ssh(stdin string, args ...string) (stdout, stderr string, code int) {
	tg.t.Helper()
	return result(tg.t, tg.command("ssh", args...), stdin)
}

func result(t *testing.T, cmd *exec.Cmd, stdin string) (stdout, stderr string, code int) {
	t.Helper()
	var o, e bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &o, &e
	err := cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return o.String(), e.String(), exit.ExitCode()
	}
	if err != nil {
		t.Fatalf("%v: %v", cmd.Args, err)
	}
	return o.String(), e.String(), 0
}

// must runs the client and wants code 0.
func (tg *target) must(args ...string) string {
	tg.t.Helper()
	stdout, stderr, code := tg.ssh("", args...)
	if code != 0 {
		tg.t.Fatalf("ssh %q: code %d\n%s%s", args, code, stdout, stderr)
	}
	return stdout
}

func run(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %q: %v\n%s", name, args, err, out)
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func randomBytes(t *testing.T, n int) []byte {
	t.Helper()
	b := make([]byte, n)
	if _, err := rand.Read(b); err != nil {
		t.Fatal(err)
	}
	return b
}

// dial connects with x/crypto/ssh, for what the OpenSSH client cannot be made
// to send.
func (tg *target) dial() *gossh.Client {
	tg.t.Helper()
	signer, err := gossh.ParsePrivateKey([]byte(read(tg.t, tg.file("id"))))
	if err != nil {
		tg.t.Fatal(err)
	}
	client, err := gossh.Dial("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(tg.port)), &gossh.ClientConfig{
		User: "x", Auth: []gossh.AuthMethod{gossh.PublicKeys(signer)},
		HostKeyCallback: gossh.InsecureIgnoreHostKey(), //nolint:gosec // the test's own server
	})
	if err != nil {
		tg.t.Fatal(err)
	}
	tg.t.Cleanup(func() { _ = client.Close() })
	return client
}

func newKey(t *testing.T) (ed25519.PrivateKey, string) {
	t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	block, err := gossh.MarshalPrivateKey(key, "")
	if err != nil {
		t.Fatal(err)
	}
	return key, string(pem.EncodeToMemory(block))
}
