//go:build unix

package main

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os/exec"
	"sync"
	"syscall"

	"golang.org/x/crypto/ssh"
)

// serveSSH is a session server that runs commands with this machine's shell.
// "HANGUP" cuts the connection; a terminal's size goes to standard output.
func (f *fakeGateway) serveSSH(conn net.Conn, name string) {
	if f.impostor {
		name = "other"
	}
	host, err := f.keys.Host(name)
	if err != nil {
		return
	}
	config := &ssh.ServerConfig{PublicKeyCallback: func(meta ssh.ConnMetadata, key ssh.PublicKey) (*ssh.Permissions, error) {
		if !bytes.Equal(key.Marshal(), f.keys.Client().PublicKey().Marshal()) || meta.User() == "nobody" {
			return nil, errRefusedHere
		}
		return &ssh.Permissions{}, nil
	}}
	config.AddHostKey(host.Signer)
	config.AddHostKey(host.Cert)
	server, channels, requests, err := ssh.NewServerConn(conn, config)
	if err != nil {
		return
	}
	var work sync.WaitGroup
	defer work.Wait()
	defer server.Close()
	work.Go(func() { ssh.DiscardRequests(requests) })
	for ch := range channels {
		channel, requests, err := ch.Accept()
		if err != nil {
			return
		}
		work.Go(func() { serveSession(server, channel, requests) })
	}
}

func serveSession(server *ssh.ServerConn, channel ssh.Channel, requests <-chan *ssh.Request) {
	var work sync.WaitGroup
	defer work.Wait()
	var cmd *exec.Cmd
	for req := range requests {
		ok := true
		switch req.Type {
		case "pty-req":
			var p struct {
				Term                  string
				Width, Height, XP, YP uint32
				Modes                 string
			}
			ok = ssh.Unmarshal(req.Payload, &p) == nil
			_, _ = io.WriteString(channel, "pty "+p.Term+"\n")
		case "window-change":
			_, _ = io.WriteString(channel, "resized\n")
		case "signal":
			if cmd != nil {
				n := syscall.SIGTERM
				if string(req.Payload[4:]) == "INT" {
					n = syscall.SIGINT
				}
				_ = cmd.Process.Signal(n)
			}
		case "exec":
			line := string(req.Payload[4:])
			if line == "'HANGUP'" {
				_ = server.Close()
				continue
			}
			cmd = exec.Command("/bin/sh", "-c", "exec "+line) // signals are for the command, not for a shell around it
			cmd.Stdout, cmd.Stderr = channel, channel.Stderr()
			stdin, err := cmd.StdinPipe()
			if err == nil {
				err = cmd.Start()
			}
			if ok = err == nil; !ok {
				break
			}
			work.Go(func() {
				_, _ = io.Copy(stdin, channel)
				_ = stdin.Close()
			})
			work.Go(func() { endSession(channel, cmd) })
		}
		if req.WantReply {
			_ = req.Reply(ok, nil)
		}
	}
	if cmd != nil && cmd.Process != nil {
		_ = cmd.Process.Kill() // it has ended, unless the connection was lost
	}
}

func endSession(channel ssh.Channel, cmd *exec.Cmd) {
	err := cmd.Wait()
	exit, _ := errors.AsType[*exec.ExitError](err)
	if exit != nil && exit.Sys().(syscall.WaitStatus).Signaled() {
		name := "TERM"
		if exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGINT {
			name = "INT"
		}
		_, _ = channel.SendRequest("exit-signal", false, ssh.Marshal(struct {
			Name       string
			Core       bool
			Text, Lang string
		}{Name: name}))
	} else {
		code := uint32(cmd.ProcessState.ExitCode())
		_, _ = channel.SendRequest("exit-status", false, ssh.Marshal(struct{ Code uint32 }{code}))
	}
	_ = channel.CloseWrite()
	_ = channel.Close()
}
