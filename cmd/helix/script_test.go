//go:build unix

package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

// scripts numbers the scripts, for a network of its own to each gateway.
type scripts struct {
	count atomic.Int32
	agent string
}

func TestScript(t *testing.T) {
	s := &scripts{agent: filepath.Join(t.TempDir(), "helix-agent")}
	build := exec.Command("go", "build", "-o", s.agent, "helix.local/helix/cmd/helix-agent")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the agent: %v\n%s", err, out)
	}
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Setup: func(env *testscript.Env) error {
			state, err := os.MkdirTemp("", "hx") // short: a unix socket's path has room for little
			if err != nil {
				return err
			}
			env.Defer(func() {
				if err := os.RemoveAll(state); err != nil {
					t.Error(err)
				}
			})
			env.Setenv("HELIX_STATE", state)
			env.Setenv("HOME", env.WorkDir)
			env.Setenv("TZ", "UTC")
			// Two networks a gateway: its own, and the one above for programs.
			network := 100 + 2*(s.count.Add(1)%50) // other programs like the lower ones
			env.Setenv("RANGE", fmt.Sprintf("127.%d.0.0/16", network))
			env.Setenv("AGENT", s.agent)
			env.Values[gatewayKey{}] = &running{}
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){"gateway": s.gateway, "code": code},
	})
}

// gatewayKey is where a script's environment keeps its gateway.
type gatewayKey struct{}

// running is the gateway of one script.
type running struct {
	cmd   *exec.Cmd
	ended chan struct{}
}

func (r *running) end(s syscall.Signal) {
	if r.cmd == nil {
		return
	}
	_ = r.cmd.Process.Signal(s) // it may have ended by itself
	<-r.ended
}

// gateway runs "helix up" with the arguments, and returns when it says that it
// is ready. "gateway stop" ends it, "gateway kill" does so by SIGKILL.
func (s *scripts) gateway(ts *testscript.TestScript, _ bool, args []string) {
	r := ts.Value(gatewayKey{}).(*running)
	if len(args) == 1 && args[0] == "stop" {
		r.end(syscall.SIGTERM)
		if code := r.cmd.ProcessState.ExitCode(); code != 0 {
			ts.Fatalf("gateway ended with code %d\n%s", code, ts.ReadFile("gateway.log"))
		}
		return
	}
	if len(args) == 1 && args[0] == "kill" {
		r.end(syscall.SIGKILL)
		return
	}
	socket := filepath.Join(ts.Getenv("HELIX_STATE"), "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	ts.Check(err)
	defer os.Remove(socket)
	defer conn.Close()
	self, err := exec.LookPath("helix")
	ts.Check(err)
	log, err := os.Create(ts.MkAbs("gateway.log"))
	ts.Check(err)
	defer log.Close()
	r.cmd = exec.Command(self, append([]string{"up", "--range", ts.Getenv("RANGE"), "--agent", s.agent, "--grace", "1s"}, args...)...)
	r.cmd.Env = append(os.Environ(), "HELIX_STATE="+ts.Getenv("HELIX_STATE"), "HOME="+ts.Getenv("HOME"), "NOTIFY_SOCKET="+socket)
	r.cmd.Stdout, r.cmd.Stderr = log, log
	ts.Check(r.cmd.Start())
	r.ended = make(chan struct{})
	go func() {
		defer close(r.ended)
		_ = r.cmd.Wait() // its code is in ProcessState
		_ = conn.Close() // ends the wait for READY
	}()
	ts.Defer(func() { r.end(syscall.SIGKILL) })
	buf := make([]byte, 64)
	n, err := conn.Read(buf)
	if err != nil || string(buf[:n]) != "READY=1" {
		ts.Fatalf("gateway said %q, %v\n%s", buf[:n], err, ts.ReadFile("gateway.log"))
	}
}

// code runs a command and checks its exit code: code N COMMAND...
func code(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: code N COMMAND [ARGUMENT...]")
	}
	err := ts.Exec(args[1], args[2:]...)
	got := 0
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		got = exit.ExitCode()
	} else if err != nil {
		ts.Fatalf("%v", err)
	}
	if fmt.Sprint(got) != args[0] {
		ts.Fatalf("exit code %d, want %s", got, args[0])
	}
}
