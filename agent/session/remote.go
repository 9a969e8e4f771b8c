package session

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	gossh "golang.org/x/crypto/ssh"
)

// forwardTCP serves ssh -R. It listens on loopback only, whatever address was
// asked: what is for others goes through the gateway.
func (c *connection) forwardTCP(conn gossh.Conn, payload []byte) (bool, []byte) {
	var p forwardTCP
	if gossh.Unmarshal(payload, &p) != nil {
		return false, nil
	}
	port, err := parsePort(p.Port)
	if err != nil {
		return false, nil
	}
	ln, err := net.Listen("tcp", netip.AddrPortFrom(bindAddress(p.Host), port).String()) //nolint:noctx // returns at once
	if err != nil {
		c.srv.log.Info("remote forward refused", "err", err)
		return false, nil
	}
	bound, ok := ln.Addr().(*net.TCPAddr)
	if !ok {
		_ = ln.Close() // cannot happen with "tcp"
		return false, nil
	}
	described := func(accepted net.Conn) []byte {
		origin := hostPort(accepted.RemoteAddr())
		originPort, _ := strconv.ParseUint(origin[1], 10, 16) // made by hostPort
		return gossh.Marshal(&directTCP{p.Host, uint32(bound.Port), origin[0], uint32(originPort)})
	}
	if err := c.listen(tcpKey(p.Host, uint32(bound.Port)), ln, conn, "forwarded-tcpip", described); err != nil {
		c.srv.log.Info("remote forward refused", "err", err)
		return false, nil
	}
	if p.Port == 0 {
		return true, gossh.Marshal(&struct{ Port uint32 }{uint32(bound.Port)})
	}
	return true, nil
}

// bindAddress keeps loopback addresses and turns everything else into 127.0.0.1.
func bindAddress(host string) netip.Addr {
	if addr, err := netip.ParseAddr(host); err == nil && addr.IsLoopback() && addr.Zone() == "" {
		return addr
	}
	return netip.AddrFrom4([4]byte{127, 0, 0, 1})
}

func tcpKey(host string, port uint32) string { return fmt.Sprintf("tcp %s %d", host, port) }

func (c *connection) cancelTCP(_ gossh.Conn, payload []byte) (bool, []byte) {
	var p forwardTCP
	return gossh.Unmarshal(payload, &p) == nil && c.cancel(tcpKey(p.Host, p.Port)), nil
}

// forwardUnix serves ssh -R with a socket in the target. The socket belongs to
// the account that logged in.
func (c *connection) forwardUnix(conn gossh.Conn, payload []byte) (bool, []byte) {
	var p struct{ Path string }
	if gossh.Unmarshal(payload, &p) != nil || p.Path == "" || strings.ContainsRune(p.Path, 0) {
		return false, nil
	}
	server, ok := conn.(*gossh.ServerConn)
	if !ok {
		return false, nil
	}
	ln, err := c.listenUnix(server.User(), p.Path)
	if err != nil {
		c.srv.log.Info("remote forward refused", "err", err)
		return false, nil
	}
	described := func(net.Conn) []byte { return gossh.Marshal(&forwardedUnix{Path: p.Path}) }
	if err := c.listen("unix "+p.Path, ln, conn, "forwarded-streamlocal@openssh.com", described); err != nil {
		c.srv.log.Info("remote forward refused", "err", err)
		return false, nil
	}
	return true, nil
}

func (c *connection) listenUnix(login, path string) (net.Listener, error) {
	account, err := c.srv.cfg.Accounts(login)
	if err != nil {
		return nil, err
	}
	if !filepath.IsAbs(path) {
		dir, _, err := c.srv.folder(account)
		if err != nil {
			return nil, err
		}
		path = filepath.Join(dir, path)
	}
	ln, err := net.Listen("unix", path) //nolint:noctx // returns at once
	if err != nil {
		return nil, err //nolint:wrapcheck // names the path
	}
	if err := protect(path, account, 0o600); err != nil {
		return nil, errors.Join(err, ln.Close())
	}
	return ln, nil
}

// protect gives path to account alone.
func protect(path string, account Account, mode os.FileMode) error {
	if err := os.Chmod(path, mode); err != nil {
		return fmt.Errorf("protect %s: %w", path, err)
	}
	if account.Own {
		return nil
	}
	if err := os.Lchown(path, int(account.UID), int(account.GID)); err != nil {
		return fmt.Errorf("hand %s to %q: %w", path, account.Name, err)
	}
	return nil
}

func (c *connection) cancelUnix(_ gossh.Conn, payload []byte) (bool, []byte) {
	var p struct{ Path string }
	return gossh.Unmarshal(payload, &p) == nil && c.cancel("unix "+p.Path), nil
}

// agentSocket is where programs of the connection find the user's ssh agent.
type agentSocket struct {
	listener net.Listener
	dir      string
	path     string
}

// agentForwarding makes the connection's agent socket, once, and reports
// whether there is one.
func (c *connection) agentForwarding(conn *gossh.ServerConn) bool {
	c.mu.Lock()
	agent := c.agent
	c.mu.Unlock()
	if agent != nil {
		return true
	}
	agent, err := c.newAgentSocket(conn.User())
	if err != nil {
		c.srv.log.Warn("agent forwarding refused", "err", err)
		return false
	}
	c.mu.Lock()
	if c.ended || c.agent != nil { // another channel was faster
		ended := c.ended
		c.mu.Unlock()
		c.closeAgent(agent)
		return !ended
	}
	c.agent = agent
	c.mu.Unlock()
	return c.spawn(func() {
		c.acceptForwarded(agent.listener, conn, "auth-agent@openssh.com", func(net.Conn) []byte { return nil })
	})
}

func (c *connection) newAgentSocket(login string) (*agentSocket, error) {
	account, err := c.srv.cfg.Accounts(login)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "helix-ssh-agent-")
	if err != nil {
		return nil, err //nolint:wrapcheck // names the path
	}
	agent := &agentSocket{dir: dir, path: filepath.Join(dir, "agent")}
	ln, err := net.Listen("unix", agent.path) //nolint:noctx // returns at once
	if err == nil {
		agent.listener = ln
		err = errors.Join(protect(agent.path, account, 0o600), protect(dir, account, 0o700))
	}
	if err != nil {
		c.closeAgent(agent)
		return nil, err //nolint:wrapcheck // names the path
	}
	return agent, nil
}

func (c *connection) closeAgent(a *agentSocket) {
	if a.listener != nil {
		c.closeListener(a.listener)
	}
	if err := os.RemoveAll(a.dir); err != nil {
		c.srv.log.Warn("agent socket not removed", "err", err)
	}
}
