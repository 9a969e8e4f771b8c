package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/knownhosts"
	"golang.org/x/term"

	"helix.local/helix/gateway/api"
)

type execFlags struct {
	user string
	tty  bool
}

func (a *app) execCommand() *cobra.Command {
	var f execFlags
	cmd := &cobra.Command{
		Use: "exec NAME -- COMMAND [ARGUMENT...]", Short: "Run one command in a workspace",
		Long: `Run one command in a workspace, with its standard input, output, error and exit
code passed through. The arguments arrive exactly as they are given; for shell
syntax, run a shell.`,
		Example: `  helix exec demo -- ls -l
  helix exec demo -- sh -c 'make 2>&1 | tail'
  helix exec -t demo -- htop`,
		Args: func(cmd *cobra.Command, args []string) error {
			switch dash := cmd.ArgsLenAtDash(); {
			case len(args) == 0 || dash == 0:
				return missing(cmd, "NAME")
			case dash < 0 && len(args) > 1:
				return usagef("usage: "+cmd.UseLine(), "%s: put -- before the command", commandName(cmd))
			case len(args) == 1:
				return missing(cmd, "the command")
			case dash > 1:
				return surplus(cmd, args[1])
			}
			return nil
		},
		ValidArgsFunction: a.completeNames,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.exec(cmd.Context(), args[0], args[1:], f)
		},
	}
	cmd.Flags().StringVarP(&f.user, "user", "u", "helix", "`user` in the workspace")
	cmd.Flags().BoolVarP(&f.tty, "tty", "t", false, "give the command a terminal")
	return cmd
}

// exec runs argv in a workspace. Signals belong to the command, so that ctx,
// which they end, is not used; the connection's end is the other way out.
func (a *app) exec(ctx context.Context, name string, argv []string, f execFlags) error {
	own := context.WithoutCancel(ctx)
	signals := make(chan os.Signal, 8) // as many as a person can send while the connection is made
	signal.Notify(signals, execSignals()...)
	defer signal.Stop(signals)
	dialed, stop := context.WithCancelCause(own)
	defer stop(nil)
	unhook := context.AfterFunc(ctx, func() { stop(context.Cause(ctx)) })
	client, err := a.dialSSH(dialed, name, f.user)
	unhook()
	if err != nil {
		if cause, ok := context.Cause(dialed).(signalError); ok {
			return &exitError{code: exitSignal + int(cause.signal)}
		}
		return &exitError{exitConnection, fmt.Errorf("exec in %q: %w", name, err)}
	}
	defer client.Close()
	return a.remote(client, name, argv, f.tty, signals)
}

// dialSSH makes an authenticated SSH connection to a workspace.
func (a *app) dialSSH(ctx context.Context, name, user string) (*ssh.Client, error) {
	var access api.SSHAccess
	var ws api.Workspace
	err := a.withClient(func(c *api.Client) error {
		var err error
		if ws, err = c.Workspace(ctx, name); err != nil {
			return err
		}
		if ws.Broken != "" {
			return fmt.Errorf("its record is broken: %s", ws.Broken)
		}
		access, err = c.SSH(ctx)
		return err
	})
	if err != nil {
		return nil, err
	}
	config, err := clientConfig(access, user)
	if err != nil {
		return nil, err
	}
	socket, err := a.socket("proxy.sock")
	if err != nil {
		return nil, err
	}
	conn, err := api.DialProxy(ctx, socket, api.ProxyRequest{Host: ws.Hostname, Port: 22})
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() }) // ends the handshake
	defer stop()
	through, channels, requests, err := ssh.NewClientConn(conn, net.JoinHostPort(ws.Hostname, "22"), config)
	if err != nil {
		_ = conn.Close() // the handshake's error is the one that matters
		return nil, err
	}
	return ssh.NewClient(through, channels, requests), nil
}

// clientConfig trusts what the gateway's known_hosts file says and nothing
// else, and logs in with the command line's own key.
func clientConfig(access api.SSHAccess, user string) (*ssh.ClientConfig, error) {
	known, err := knownhosts.New(access.KnownHosts)
	if err != nil {
		return nil, fmt.Errorf("read known hosts: %w", err)
	}
	text, err := os.ReadFile(access.KeyFile)
	if err != nil {
		return nil, fmt.Errorf("read the command line's key: %w", err)
	}
	key, err := ssh.ParsePrivateKey(text)
	if err != nil {
		return nil, fmt.Errorf("read the command line's key %s: %w", access.KeyFile, err)
	}
	return &ssh.ClientConfig{
		User: user, Auth: []ssh.AuthMethod{ssh.PublicKeys(key)},
		HostKeyCallback: func(host string, _ net.Addr, key ssh.PublicKey) error {
			return known(host, hostAddr(host), key) // a unix socket's address tells nothing, and knownhosts refuses it
		},
	}, nil
}

// hostAddr is host:port as an address.
type hostAddr string

func (hostAddr) Network() string  { return "helix" }
func (h hostAddr) String() string { return string(h) }

// remote runs argv over client and returns when it has ended.
func (a *app) remote(client *ssh.Client, name string, argv []string, tty bool, signals <-chan os.Signal) error {
	lost := func(err error) error {
		if _, ok := errors.AsType[*ssh.ExitMissingError](err); ok || errors.Is(err, io.EOF) {
			err = errors.New("the connection was lost before the command ended")
		}
		return &exitError{exitConnection, fmt.Errorf("exec in %q: %w", name, err)}
	}
	session, err := client.NewSession()
	if err != nil {
		return lost(err)
	}
	defer session.Close()
	if tty {
		restore, err := a.terminal(session)
		if err != nil {
			return lost(err)
		}
		defer restore()
	}
	hangUp := func() { _ = client.Close() } // its Wait tells what comes of it
	out, errOut := &watched{a.stdout, hangUp}, &watched{a.stderr, hangUp}
	session.Stdout, session.Stderr = out, errOut
	stdin, err := session.StdinPipe()
	if err != nil {
		return lost(err)
	}
	if err := session.Start(quoteAll(argv)); err != nil {
		return lost(err)
	}
	// Nobody waits for this one: a read from standard input cannot be ended, and
	// the program ends right after.
	go func() {
		_, _ = io.Copy(stdin, a.stdin) // the command may end without reading it all
		_ = stdin.Close()
	}()
	done := make(chan struct{})
	var forward sync.WaitGroup
	forward.Go(func() { a.forwardSignals(session, signals, done, hangUp) })
	err = session.Wait()
	close(done)
	forward.Wait()
	if err == nil {
		return nil
	}
	if exit, ok := errors.AsType[*ssh.ExitError](err); ok {
		return &exitError{code: exit.ExitStatus()} // 128+n for a signal
	}
	return lost(err)
}

// patience is how many signals of one kind a command may leave unheeded before
// the connection is closed under it.
const patience = 3

// forwardSignals passes signals on to the command, and the terminal's size.
func (a *app) forwardSignals(session *ssh.Session, signals <-chan os.Signal, done <-chan struct{}, hangUp func()) {
	seen := make(map[os.Signal]int)
	for {
		select {
		case <-done:
			return
		case s := <-signals:
			if isResize(s) {
				if width, height, ok := a.size(); ok {
					_ = session.WindowChange(height, width) // a lost connection shows in Wait
				}
				continue
			}
			if seen[s]++; seen[s] >= patience {
				hangUp()
				return
			}
			_ = session.Signal(signalName(s)) // a lost connection shows in Wait
		}
	}
}

func signalName(s os.Signal) ssh.Signal {
	switch s {
	case syscall.SIGINT:
		return ssh.SIGINT
	case syscall.SIGHUP:
		return ssh.SIGHUP
	}
	return ssh.SIGTERM
}

// terminal asks for a terminal on the other side and makes ours a raw one.
func (a *app) terminal(session *ssh.Session) (restore func(), err error) {
	kind := a.getenv("TERM")
	if kind == "" {
		kind = "xterm"
	}
	width, height, ok := a.size()
	if !ok {
		width, height = 80, 24
	}
	if err := session.RequestPty(kind, height, width, ssh.TerminalModes{}); err != nil {
		return nil, fmt.Errorf("ask for a terminal: %w", err)
	}
	if !isTerminal(a.stdin) {
		return func() {}, nil
	}
	fd := int(a.stdin.(*os.File).Fd())
	before, err := term.MakeRaw(fd)
	if err != nil {
		return nil, fmt.Errorf("set up the terminal: %w", err)
	}
	return func() { _ = term.Restore(fd, before) }, nil // the terminal may be gone
}

// size is that of the terminal on standard input.
func (a *app) size() (width, height int, ok bool) {
	if !isTerminal(a.stdin) {
		return 0, 0, false
	}
	width, height, err := term.GetSize(int(a.stdin.(*os.File).Fd()))
	return width, height, err == nil
}

// watched hangs up when what the command says can no longer be written: else
// the command would block for ever on a full window.
type watched struct {
	w      io.Writer
	hangUp func()
}

func (w *watched) Write(p []byte) (int, error) {
	n, err := w.w.Write(p)
	if err != nil {
		w.hangUp()
	}
	return n, err
}
