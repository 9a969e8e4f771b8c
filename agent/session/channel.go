package session

import (
	"fmt"
	"io"
	"sync"
	"syscall"

	gossh "golang.org/x/crypto/ssh"
)

// sessionChannel is one channel of type "session". Its fields belong to the
// goroutine that reads its requests.
type sessionChannel struct {
	conn *connection
	ssh  *gossh.ServerConn
	ch   gossh.Channel

	env     environment
	tty     *terminal
	agent   bool // agent forwarding was asked for on this channel
	started bool // one shell, exec or subsystem a channel

	prog *program
	gone chan struct{} // closed when the channel is over, whoever ended it
}

func (c *connection) serveSession(conn *gossh.ServerConn, newChannel gossh.NewChannel) {
	ch, requests, err := newChannel.Accept()
	if err != nil {
		return // the connection is gone
	}
	s := &sessionChannel{conn: c, ssh: conn, ch: ch, gone: make(chan struct{})}
	var work sync.WaitGroup
	defer work.Wait()
	defer close(s.gone)
	for req := range requests {
		ok, run := s.handle(req.Type, req.Payload)
		if req.WantReply {
			if err := req.Reply(ok, nil); err != nil {
				break // the loop would end at once anyway
			}
		}
		if run != nil {
			work.Go(func() {
				defer c.contain()
				defer func() { _ = ch.Close() }() // it ends here, one way or the other
				run()
			})
		}
	}
}

// handle serves one request. run is what goes on after the reply.
func (s *sessionChannel) handle(kind string, payload []byte) (ok bool, run func()) {
	switch kind {
	case "env":
		var p envPayload
		return gossh.Unmarshal(payload, &p) == nil && !s.started && s.env.set(p.Name, p.Value), nil
	case "pty-req":
		if s.tty != nil || s.started {
			return false, nil
		}
		tty, err := parsePTY(payload)
		if err != nil || !terminals {
			return false, nil
		}
		s.tty = &tty
		return true, nil
	case "window-change":
		return s.resize(payload), nil
	case "auth-agent-req@openssh.com":
		s.agent = !s.started && s.conn.agentForwarding(s.ssh)
		return s.agent, nil
	case "shell":
		return s.start(nil)
	case "exec":
		var p textPayload
		if gossh.Unmarshal(payload, &p) != nil {
			return false, nil
		}
		return s.start(&p.Text)
	case "subsystem":
		var p textPayload
		if gossh.Unmarshal(payload, &p) != nil || p.Text != "sftp" || s.started {
			return false, nil
		}
		s.started = true
		return true, s.sftp
	case "signal":
		var p textPayload
		if gossh.Unmarshal(payload, &p) != nil {
			return false, nil
		}
		return s.signal(p.Text), nil
	}
	return false, nil
}

// start begins a shell (command nil) or a command. The program is started
// before the reply, so that signals and sizes that follow find it; what went
// wrong is told on stderr with a status, as a shell would do.
func (s *sessionChannel) start(command *string) (ok bool, run func()) {
	if s.started {
		return false, nil
	}
	s.started = true
	account, err := s.conn.srv.cfg.Accounts(s.ssh.User())
	if err == nil {
		err = s.launch(account, command)
	}
	if err != nil {
		return true, func() { s.fail(err) }
	}
	return true, s.attend
}

// launch starts the account's shell.
func (s *sessionChannel) launch(a Account, command *string) error {
	cmd, note, err := s.conn.srv.shell(a, command)
	if err != nil {
		return err
	}
	extra := s.conn.addresses()
	if s.tty != nil && s.tty.term != "" {
		extra = append(extra, "TERM="+s.tty.term)
	}
	if s.agent {
		extra = append(extra, "SSH_AUTH_SOCK="+s.conn.agent.path)
	}
	cmd.Env = merge(cmd.Env, s.env.list, extra)
	if note != "" {
		if _, err := io.WriteString(s.ch.Stderr(), note+"\r\n"); err != nil {
			return fmt.Errorf("tell the client: %w", err)
		}
	}
	if s.tty != nil {
		s.prog, err = s.conn.srv.startTTY(cmd, a, *s.tty)
	} else {
		s.prog, err = s.conn.srv.startPiped(cmd)
	}
	return err
}

// attend carries the program's streams until it has ended and its output is
// drained, then says how it ended. A background process that holds stdout or
// stderr keeps the channel open, as with OpenSSH. Standard input is not waited for.
func (s *sessionChannel) attend() {
	p := s.prog
	defer p.closeStreams()
	var in, out sync.WaitGroup
	defer in.Wait()
	defer func() { _ = s.ch.Close() }() // ends the copy of standard input
	in.Go(func() { s.copyIn(p) })
	out.Go(func() { copyOut(s.ch, p.stdout) })
	if p.stderr != nil {
		out.Go(func() { copyOut(s.ch.Stderr(), p.stderr) })
	}
	drained := make(chan struct{})
	go func() { out.Wait(); close(drained) }() // ended by closeStreams at the latest
	defer func() { <-drained }()
	defer p.closeStreams()

	for _, event := range []<-chan struct{}{drained, p.ended} {
		select {
		case <-event:
		case <-s.gone:
			s.hangUp(p)
			return
		}
	}
	s.exit(p.result())
}

// copyIn passes standard input and its end. Under a terminal the end is the
// terminal's end-of-file character, since a master cannot be half closed. A
// dead connection is no end of input: hangUp deals with it.
func (s *sessionChannel) copyIn(p *program) {
	_, err := io.CopyBuffer(struct{ io.Writer }{p.stdin}, struct{ io.Reader }{s.ch}, make([]byte, copyBuffer))
	if err == nil && s.conn.dead(s.ssh) {
		return
	}
	if p.tty != nil {
		if err == nil {
			_, _ = p.tty.Write([]byte{4}) // a closed terminal needs no end
		}
		return
	}
	_ = p.stdin.Close() // may be closed already
}

// hangUp ends a program whose client is gone: it loses its streams and gets
// SIGHUP, which nohup and daemons ignore.
func (s *sessionChannel) hangUp(p *program) {
	if !p.alive() {
		return
	}
	err := p.child.SignalGroup(syscall.SIGHUP)
	if err == nil {
		err = p.child.SignalGroup(sigContinue) // a stopped one would never see it
	}
	if err != nil {
		s.conn.srv.log.Warn("program not hung up", "err", err)
	}
}

// exit ends the channel: status, EOF, close. The status comes first, because a
// client may close the channel as soon as it has seen EOF, and then nothing can
// be told any more.
func (s *sessionChannel) exit(status uint32, signal string, core bool) {
	if signal != "" { // these three fail only when the client is gone
		_, _ = s.ch.SendRequest("exit-signal", false, gossh.Marshal(&exitSignal{Signal: signal, Core: core}))
	} else {
		_, _ = s.ch.SendRequest("exit-status", false, gossh.Marshal(&exitStatus{status}))
	}
	_ = s.ch.CloseWrite()
	_ = s.ch.Close()
}

// fail tells why nothing was started.
func (s *sessionChannel) fail(err error) {
	s.conn.srv.log.Warn("program not started", "err", err)
	_, _ = fmt.Fprintf(s.ch.Stderr(), "helix-agent: %v\r\n", err) // the client may be gone
	s.exit(127, "", false)
}

func (s *sessionChannel) resize(payload []byte) bool {
	var size windowPayload
	if gossh.Unmarshal(payload, &size) != nil || s.tty == nil {
		return false
	}
	s.tty.size = size // counts when the shell is not started yet
	if s.prog == nil {
		return true
	}
	return setSize(s.prog.tty, size) == nil
}

func (s *sessionChannel) signal(name string) bool {
	number, ok := signalNumber(name)
	if !ok || s.prog == nil {
		return false
	}
	return s.prog.child.SignalGroup(number) == nil
}
