//go:build linux

package agent

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	gossh "golang.org/x/crypto/ssh"

	"helix.local/helix/agent/session"
	"helix.local/helix/agent/wire"
	"helix.local/helix/tunnel"
)

// TestMain also is the agent's program: an agent changes its whole process.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 {
		var err error
		switch os.Args[1] {
		case "dir":
			err = RunDir(context.Background(), DirConfig{
				Boot: os.Stdin, Link: os.NewFile(3, "link"), Env: os.Environ(), Version: "test",
				Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
			})
		case SFTPCommand:
			err = session.ServeSFTP(standard{os.Stdin, os.Stdout}, ".")
		case "listen": // on HELIX_ADDR at the port that comes on standard input
			err = listen()
		default:
			err = fmt.Errorf("unknown argument %q", os.Args[1])
		}
		if err != nil && !strings.HasPrefix(os.Args[1], "-test") {
			_, _ = fmt.Fprintln(os.Stderr, "agent:", err) // nobody to tell
			os.Exit(1)
		}
		if !strings.HasPrefix(os.Args[1], "-test") {
			os.Exit(0)
		}
	}
	goleak.VerifyTestMain(m)
}

type standard struct {
	io.Reader
	io.WriteCloser
}

// listen answers each connection with the workspace's name after its end.
func listen() error {
	var port int
	if _, err := fmt.Fscan(os.Stdin, &port); err != nil {
		return err
	}
	ln, err := net.Listen("tcp", net.JoinHostPort(os.Getenv("HELIX_ADDR"), strconv.Itoa(port)))
	if err != nil {
		return err
	}
	fmt.Println(ln.Addr().(*net.TCPAddr).Port) //nolint:forbidigo // the test reads it
	for {
		c, err := ln.Accept()
		if err != nil {
			return err
		}
		n, err := io.Copy(io.Discard, c)
		if err == nil {
			_, _ = fmt.Fprintf(c, "%s got %d", os.Getenv("HELIX_WORKSPACE"), n)
		}
		_ = c.Close()
	}
}

// gateway pairs agents as a real one does.
type gateway struct {
	key ed25519.PrivateKey

	mu     sync.Mutex
	token  wire.Secret // "" once used
	paired string      // public key
	seen   []string    // what each introduction showed
	// forget makes the gateway pair and then break the link without an answer.
	forget bool
	refuse wire.Refusal // refuses all, when set
}

func newGateway(t *testing.T) *gateway {
	t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return &gateway{key: key, token: "the-bootstrap-secret"}
}

func (g *gateway) boot(workspace, dir, address string) wire.Boot {
	return wire.Boot{
		Version: wire.Version, Workspace: workspace, Zone: "helix.local", Target: workspace + "-1", Generation: 7,
		Token: g.token, GatewayKey: g.key.Public().(ed25519.PublicKey), Dir: dir, Address: address,
	}
}

func (g *gateway) offer(_ context.Context, _ wire.Hello, in wire.Introduction) (wire.Welcome, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	shown := "key"
	if in.Token != "" {
		shown = "token"
	}
	g.seen = append(g.seen, shown)
	switch {
	case g.refuse != "":
		return wire.Welcome{}, &tunnel.RefusedError{Reason: g.refuse}
	case in.Token != "" && in.Token == g.token:
		g.token, g.paired = "", string(in.PublicKey)
	case in.Token != "":
		return wire.Welcome{}, &tunnel.RefusedError{Reason: wire.RefusedToken}
	case string(in.PublicKey) != g.paired:
		return wire.Welcome{}, &tunnel.RefusedError{Reason: wire.RefusedCredential}
	}
	return wire.Welcome{Session: strconv.Itoa(len(g.seen)), Epoch: uint64(len(g.seen))}, nil
}

// accept takes the gateway's end of a link. A link that breaks after pairing
// loses the welcome.
func (g *gateway) accept(ctx context.Context, conn net.Conn) (*tunnel.Session, error) {
	cfg := tunnel.GatewayConfig{Key: g.key, Offer: g.offer}
	if g.forget {
		cfg.Offer = func(ctx context.Context, h wire.Hello, in wire.Introduction) (wire.Welcome, error) {
			w, err := g.offer(ctx, h, in)
			_ = conn.Close() // the answer cannot leave any more
			return w, err
		}
	}
	return tunnel.Accept(ctx, conn, cfg)
}

// dirAgent is a running `dir` agent with the gateway's session to it.
type dirAgent struct {
	*tunnel.Session
	cmd *exec.Cmd
	key gossh.Signer
}

func startDir(t *testing.T, boot wire.Boot, g *gateway) *dirAgent {
	t.Helper()
	ours, theirs := socketPair(t)
	text, err := json.Marshal(boot)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0], "dir")
	cmd.Stdin = strings.NewReader(string(text) + "\n")
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = theirs.Close() // the child has it
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	s, err := g.accept(ctx, ours)
	if err != nil {
		t.Fatal(err)
	}
	a := &dirAgent{Session: s, cmd: cmd}
	t.Cleanup(func() {
		_ = s.Close() // ends the agent
		if cmd.ProcessState == nil {
			if err := cmd.Wait(); err != nil {
				t.Errorf("agent: %v", err)
			}
		}
	})
	return a
}

func socketPair(t *testing.T) (net.Conn, *os.File) {
	t.Helper()
	fds, err := sockets()
	if err != nil {
		t.Fatal(err)
	}
	ours := os.NewFile(uintptr(fds[0]), "gateway")
	conn, err := net.FileConn(ours)
	if err != nil {
		t.Fatal(err)
	}
	_ = ours.Close() // conn is a duplicate
	return conn, os.NewFile(uintptr(fds[1]), "agent")
}

// identify gives the agent its SSH identity and the test a key for it.
func (a *dirAgent) identify(t *testing.T) {
	t.Helper()
	host, user := newKey(t), newKey(t)
	signer, err := gossh.ParsePrivateKey([]byte(user))
	if err != nil {
		t.Fatal(err)
	}
	a.key = signer
	id := wire.Identity{HostKey: wire.Secret(host), Authorized: []string{string(gossh.MarshalAuthorizedKey(signer.PublicKey()))}}
	if status, body := a.call(t, "PUT", wire.PathIdentity, id); status != 204 {
		t.Fatalf("identity: %d %s", status, body)
	}
}

func (a *dirAgent) ssh(t *testing.T) *gossh.Client {
	t.Helper()
	st, err := a.Open(t.Context(), wire.OpenRequest{Service: wire.ServiceSSH})
	if err != nil {
		t.Fatal(err)
	}
	conn, chans, reqs, err := gossh.NewClientConn(st, "ws", &gossh.ClientConfig{
		User: "any", Auth: []gossh.AuthMethod{gossh.PublicKeys(a.key)},
		HostKeyCallback: gossh.InsecureIgnoreHostKey(), //nolint:gosec // the test's own server
	})
	if err != nil {
		t.Fatal(err)
	}
	client := gossh.NewClient(conn, chans, reqs)
	t.Cleanup(func() { _ = client.Close() })
	return client
}

func (a *dirAgent) run(t *testing.T, command string) string {
	t.Helper()
	s, err := a.ssh(t).NewSession()
	if err != nil {
		t.Fatal(err)
	}
	out, err := s.CombinedOutput(command)
	if err != nil {
		t.Fatalf("%s: %v: %s", command, err, out)
	}
	return string(out)
}

func newKey(t *testing.T) string {
	t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	block, err := gossh.MarshalPrivateKey(key, "")
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(block))
}
