package session

import (
	"context"
	"net"
	"runtime/debug"
	"strconv"
	"sync"

	"github.com/gliderlabs/ssh"
	gossh "golang.org/x/crypto/ssh"
)

// connection is one SSH connection after its login.
type connection struct {
	srv *Server
	ctx context.Context //nolint:containedctx // the connection's life, handed to handlers that the frame calls
	net net.Conn

	mu       sync.Mutex
	ended    bool
	work     sync.WaitGroup          // handlers and forwards
	forwards map[string]net.Listener // remote forwards by what the client asked for
	agent    *agentSocket            // set by the first request for agent forwarding
}

func newConnection(s *Server, ctx context.Context, nc net.Conn) *connection { //nolint:revive // ctx is kept
	return &connection{srv: s, ctx: ctx, net: nc, forwards: make(map[string]net.Listener)}
}

// spawn runs f in a goroutine that end waits for. It reports false when the
// connection is over.
func (c *connection) spawn(f func()) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return false
	}
	c.work.Go(func() {
		defer c.contain()
		f()
	})
	return true
}

// contain keeps a panic of one channel from ending the agent: this is the edge
// of a served connection.
func (c *connection) contain() {
	if r := recover(); r != nil {
		c.srv.log.Error("ssh channel panicked", "err", r, "stack", string(debug.Stack()))
	}
}

// end takes the connection's listeners away and waits for its goroutines.
func (c *connection) end() {
	c.mu.Lock()
	c.ended = true
	forwards := c.forwards
	c.forwards = nil
	agent := c.agent
	c.mu.Unlock()
	for _, ln := range forwards {
		c.closeListener(ln)
	}
	if agent != nil {
		c.closeAgent(agent)
	}
	c.work.Wait()
}

func (c *connection) channelHandlers() map[string]ssh.ChannelHandler {
	handlers := make(map[string]ssh.ChannelHandler)
	for kind, handle := range map[string]func(*gossh.ServerConn, gossh.NewChannel){
		"session":                        c.serveSession,
		"direct-tcpip":                   c.serveDirectTCP,
		"direct-streamlocal@openssh.com": c.serveDirectUnix,
	} {
		handlers[kind] = func(_ *ssh.Server, conn *gossh.ServerConn, channel gossh.NewChannel, _ ssh.Context) {
			done := make(chan struct{})
			if !c.spawn(func() { defer close(done); handle(conn, channel) }) {
				_ = channel.Reject(gossh.ConnectionFailed, "connection is closing") // it is gone anyway
				return
			}
			<-done
		}
	}
	return handlers
}

// requestHandlers serve the connection's global requests. Everything else,
// keepalive@openssh.com among it, is answered with a failure, which is an
// answer and all that a keepalive wants.
func (c *connection) requestHandlers() map[string]ssh.RequestHandler {
	handlers := make(map[string]ssh.RequestHandler)
	for kind, handle := range map[string]func(gossh.Conn, []byte) (bool, []byte){
		"tcpip-forward":                          c.forwardTCP,
		"cancel-tcpip-forward":                   c.cancelTCP,
		"streamlocal-forward@openssh.com":        c.forwardUnix,
		"cancel-streamlocal-forward@openssh.com": c.cancelUnix,
	} {
		handlers[kind] = func(ctx ssh.Context, _ *ssh.Server, req *gossh.Request) (bool, []byte) {
			defer c.contain()
			conn, ok := ctx.Value(ssh.ContextKeyConn).(*gossh.ServerConn)
			if !ok {
				return false, nil
			}
			return handle(conn, req.Payload)
		}
	}
	return handlers
}

func (c *connection) addresses() []string {
	remote, local := hostPort(c.net.RemoteAddr()), hostPort(c.net.LocalAddr())
	return []string{
		"SSH_CLIENT=" + remote[0] + " " + remote[1] + " " + local[1],
		"SSH_CONNECTION=" + remote[0] + " " + remote[1] + " " + local[0] + " " + local[1],
	}
}

// hostPort splits addr. A stream has no address of its own: programs that read
// SSH_CONNECTION still find four words.
func hostPort(addr net.Addr) [2]string {
	if tcp, ok := addr.(*net.TCPAddr); ok {
		return [2]string{tcp.IP.String(), strconv.Itoa(tcp.Port)}
	}
	return [2]string{"127.0.0.1", "0"}
}
