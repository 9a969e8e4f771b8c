package sshd

import (
	"context"
	"fmt"
	"io"
	"net"
	"sync"

	"golang.org/x/crypto/ssh"
)

// ClientConfig returns what an SSH client of this installation needs to log in
// at a workspace as user: it offers the key of Client and takes only a host
// certificate that names the workspace.
func (k *Keys) ClientConfig(workspace, user string) *ssh.ClientConfig {
	checker := &ssh.CertChecker{
		Clock:           k.cfg.Now,
		IsHostAuthority: func(ca ssh.PublicKey, _ string) bool { return string(ca.Marshal()) == string(k.CA().Marshal()) },
	}
	name := net.JoinHostPort(workspace+"."+k.cfg.Zones[0], "22")
	return &ssh.ClientConfig{
		User:              user,
		Auth:              []ssh.AuthMethod{ssh.PublicKeys(k.client)},
		HostKeyAlgorithms: []string{ssh.CertAlgoED25519v01},
		HostKeyCallback: func(_ string, remote net.Addr, key ssh.PublicKey) error {
			return checker.CheckHostKey(name, remote, key)
		},
		ClientVersion: "SSH-2.0-Helix",
	}
}

// router carries the SSH sessions of one client of the jump host to the
// workspace that the client gave as its user name. That ends encryption here,
// so it is for clients that can say nothing but a host and a user.
type router struct {
	server *Server
	user   string

	mu     sync.Mutex
	client *ssh.Client // nil before the first SSH session; guarded by mu
}

// serve answers one session channel.
func (r *router) serve(ctx context.Context, nc ssh.NewChannel) {
	up, reqs, err := r.open(ctx, nc.ExtraData())
	if err != nil {
		answer(ctx, nc, "helix: "+oneLine(explain(err))+"; "+r.server.usage())
		return
	}
	splice(nc, up, reqs)
}

// usage tells how the jump host is meant to be used.
func (s *Server) usage() string {
	zone := s.cfg.Zones[0]
	return fmt.Sprintf("%s.%s is a jump host without a shell; use: ssh -J %[1]s.%[2]s NAME.%[2]s", GatewayName, zone)
}

// open opens a session channel at the workspace.
func (r *router) open(ctx context.Context, extra []byte) (ssh.Channel, <-chan *ssh.Request, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.client == nil {
		client, err := r.dial(ctx)
		if err != nil {
			return nil, nil, err
		}
		r.client = client
	}
	return r.client.OpenChannel("session", extra)
}

func (r *router) dial(ctx context.Context) (*ssh.Client, error) {
	name, ok := workspaceOf(r.user, r.server.cfg.Zones)
	if !ok {
		return nil, fmt.Errorf("%q is not a workspace name", r.user)
	}
	conn, err := r.server.cfg.Dial(ctx, name, 22)
	if err != nil {
		return nil, err
	}
	wait, cancel := context.WithTimeout(ctx, r.server.cfg.AuthTimeout)
	defer cancel()
	stop := context.AfterFunc(wait, func() { _ = conn.Close() })
	defer stop()
	cfg := r.server.cfg.Client(name, defaultUser)
	cc, chans, reqs, err := ssh.NewClientConn(conn, name, cfg)
	if err != nil {
		_ = conn.Close() // the first error says more
		return nil, fmt.Errorf("log in at workspace %q: %w", name, err)
	}
	return ssh.NewClient(cc, chans, reqs), nil
}

// close ends the connection to the workspace.
func (r *router) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.client != nil {
		_ = r.client.Close() // the workspace may have been first
		_ = r.client.Wait()  // says only why it ended
	}
}

// splice joins the client's session channel with the workspace's. All data and
// requests of the workspace are passed on before the client's channel closes.
func splice(nc ssh.NewChannel, up ssh.Channel, upReqs <-chan *ssh.Request) {
	ch, reqs, err := nc.Accept()
	if err != nil {
		_ = up.Close() // the client is gone
		ssh.DiscardRequests(upReqs)
		return
	}
	var client, workspace, out sync.WaitGroup
	client.Go(func() { // ends at the client's end of data, or when ch is closed
		_, _ = io.Copy(up, ch) // an error here shows at the other ends too
		_ = up.CloseWrite()
	})
	client.Go(func() {
		passRequests(up, reqs)
		_ = up.Close() // the client has closed its channel
	})
	out.Go(func() { _, _ = io.Copy(ch, up) })
	out.Go(func() { _, _ = io.Copy(ch.Stderr(), up.Stderr()) })
	workspace.Go(func() {
		out.Wait()
		_ = ch.CloseWrite()
	})
	workspace.Go(func() { passRequests(ch, upReqs) })
	workspace.Wait()
	_ = ch.Close()
	client.Wait()
}

// passRequests passes channel requests on until their channel is closed.
func passRequests(to ssh.Channel, reqs <-chan *ssh.Request) {
	for req := range reqs {
		ok, err := to.SendRequest(req.Type, req.WantReply, req.Payload)
		_ = req.Reply(ok && err == nil, nil) // does nothing when none is wanted
	}
}
