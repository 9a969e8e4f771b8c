//go:build unix

package main

import (
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/creack/pty"
)

func TestExec(t *testing.T) {
	f := newFake(t)
	f.put("demo", "dir", stateRunning)
	f.listen(t)
	odd := `a b'c"d$e\f` + "\ng"
	for name, c := range map[string]struct {
		args           []string
		stdin          string
		code           int
		stdout, stderr string
	}{
		"streams and code":  {args: []string{"demo", "--", "sh", "-c", "echo o; echo e >&2; exit 7"}, code: 7, stdout: "o\n", stderr: "e\n"},
		"success":           {args: []string{"demo", "--", "true"}},
		"not a command":     {args: []string{"demo", "--", "/nowhere/x"}, code: 127},
		"exact arguments":   {args: []string{"demo", "--", "printf", "%s|", odd, "", "*", "~", "-n", "--"}, stdout: odd + "||*|~|-n|--|"},
		"standard input":    {args: []string{"demo", "--", "sort"}, stdin: "b\na\n", stdout: "a\nb\n"},
		"input left unread": {args: []string{"demo", "--", "true"}, stdin: strings.Repeat("x", 5<<20)},
		"killed":            {args: []string{"demo", "--", "sh", "-c", "kill -TERM $$"}, code: 143},
		"terminal":          {args: []string{"-t", "demo", "--", "echo", "x"}, stdout: "pty vt100\nx\n"},
		"connection lost":   {args: []string{"demo", "--", "HANGUP"}, code: 255, stderr: "the connection was lost"},
		"unknown":           {args: []string{"nope", "--", "true"}, code: 255, stderr: "helix: exec in \"nope\": workspace \"nope\" is not there\nhint: did you mean demo?"},
		"not let in":        {args: []string{"-u", "nobody", "demo", "--", "true"}, code: 255, stderr: "unable to authenticate"},
	} {
		t.Run(name, func(t *testing.T) {
			got := call{state: f.state, stdin: c.stdin, env: map[string]string{"TERM": "vt100"}}.run(t.Context(), append([]string{"exec"}, c.args...)...)
			if got.code != c.code || (c.code != 127 && got.stdout != c.stdout) || !strings.Contains(got.stderr, c.stderr) {
				t.Errorf("got code %d\nstdout: %q\nstderr: %q\nwant %d, %q, %q", got.code, got.stdout, got.stderr, c.code, c.stdout, c.stderr)
			}
		})
	}
}

func TestExecTrustsNoOtherKey(t *testing.T) {
	f := newFake(t)
	f.put("demo", "dir", stateRunning)
	f.impostor = true
	f.listen(t)
	got := call{state: f.state}.run(t.Context(), "exec", "demo", "--", "echo", "seen")
	if got.code != exitConnection || got.stdout != "" || !strings.Contains(got.stderr, "handshake") {
		t.Errorf("another workspace's key: got %+v", got)
	}
	f.impostor = false
	for name, spoil := range map[string]func(dir string) error{
		"broken key": func(dir string) error { return os.WriteFile(filepath.Join(dir, "cli_key"), []byte("x"), 0o600) },
		"no key":     func(dir string) error { return os.Remove(filepath.Join(dir, "cli_key")) },
	} {
		if err := spoil(filepath.Join(f.state, "ssh")); err != nil {
			t.Fatal(err)
		}
		got := call{state: f.state}.run(t.Context(), "exec", "demo", "--", "true")
		if got.code != exitConnection || !strings.Contains(got.stderr, "command line's key") {
			t.Errorf("%s: got %+v", name, got)
		}
	}
}

// started runs helix in a process of its own.
func started(t *testing.T, f *fakeGateway, stdin *os.File, args ...string) (*exec.Cmd, *until, chan struct{}) {
	t.Helper()
	self, err := exec.LookPath("helix") // the test program, put there by testscript
	if err != nil {
		t.Fatal(err)
	}
	ready := make(chan struct{})
	out := &until{text: "ready", then: func() { close(ready) }}
	cmd := exec.Command(self, args...)
	cmd.Env = append(os.Environ(), "HELIX_STATE="+f.state, "TERM=vt100")
	cmd.Stdout, cmd.Stderr = out, out
	if stdin != nil {
		cmd.Stdin = stdin
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd, out, ready
}

func TestExecSignals(t *testing.T) {
	f := newFake(t)
	f.put("demo", "dir", stateRunning)
	f.listen(t)
	for name, c := range map[string]struct {
		script string
		send   syscall.Signal
		code   int
		says   string
	}{
		"the command's own answer": {`trap 'echo got; kill $!; exit 9' INT; sleep 60 >/dev/null 2>&1 & echo ready; wait`, syscall.SIGINT, 9, "got"},
		"killed by it":             {"echo ready; exec sleep 60", syscall.SIGTERM, 143, ""},
	} {
		t.Run(name, func(t *testing.T) {
			cmd, out, ready := started(t, f, nil, "exec", "demo", "--", "sh", "-c", c.script)
			<-ready
			if err := cmd.Process.Signal(c.send); err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait() // the code is what is looked at
			if got := cmd.ProcessState.ExitCode(); got != c.code || !strings.Contains(out.String(), c.says) {
				t.Errorf("exit code %d, want %d; said %q", got, c.code, out)
			}
		})
	}
}

// A command that heeds no signal cannot keep a person in.
func TestExecSignalsUnheeded(t *testing.T) {
	f := newFake(t)
	f.put("demo", "dir", stateRunning)
	f.listen(t)
	cmd, out, heard := started(t, f, nil, "exec", "demo", "--", "sh", "-c",
		`n=0; trap 'n=$((n+1)); echo heard $n' INT; sleep 60 >/dev/null 2>&1 & echo ready; while kill -0 $!; do wait; done`)
	for i := range patience {
		<-heard
		heard = make(chan struct{})
		next := heard
		out.mu.Lock()
		out.text, out.then = "heard "+itoa(i+1), func() { close(next) }
		out.mu.Unlock()
		if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
			t.Fatal(err)
		}
	}
	_ = cmd.Wait() // the code is what is looked at
	if got := cmd.ProcessState.ExitCode(); got != exitConnection || !strings.Contains(out.String(), "connection was lost") {
		t.Errorf("exit code %d, want 255; said %q", got, out)
	}
}

func TestExecTerminal(t *testing.T) {
	f := newFake(t)
	f.put("demo", "dir", stateRunning)
	f.listen(t)
	ptmx, tty, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer ptmx.Close()
	cmd, out, ready := started(t, f, tty, "exec", "-t", "demo", "--", "sh", "-c", "echo ready; read x; echo got $x")
	<-ready
	resized := make(chan struct{})
	out.mu.Lock()
	out.text, out.then = "resized", func() { close(resized) }
	out.mu.Unlock()
	if err := cmd.Process.Signal(syscall.SIGWINCH); err != nil {
		t.Fatal(err)
	}
	<-resized
	if _, err := io.WriteString(ptmx, "\x03\n"); err != nil { // in raw mode Ctrl-C is a byte for the command
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil || !strings.Contains(out.String(), "got \x03\n") {
		t.Errorf("ended with %v, said %q", err, out)
	}
	if err := tty.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestExecInterruptedWhileConnecting(t *testing.T) {
	f := newFake(t)
	f.put("demo", "dir", stateRunning)
	f.listen(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(signalError{2})
	if got := (call{state: f.state}).run(ctx, "exec", "demo", "--", "true"); got.code != 130 {
		t.Errorf("got %+v, want exit code 130", got)
	}
}

func TestSSHArguments(t *testing.T) {
	f := newFake(t)
	f.put("demo", "dir", stateRunning)
	f.listen(t)
	bin := t.TempDir()
	if err := os.WriteFile(filepath.Join(bin, "ssh"), []byte("#!/bin/sh\nprintf '%s|' \"$@\"\nexit 5\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	self, err := exec.LookPath("helix")
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		path string
		args []string
		code int
		want string
	}{
		"all":     {bin, []string{"root@demo", "-L", "8080:localhost:80", "--", "ls", "-l"}, 5, "-F|" + f.state + "/ssh/config|root@demo.helix.local|-L|8080:localhost:80|--|ls|-l|"},
		"no ssh":  {"/nowhere", []string{"demo"}, 255, "hint: install it"},
		"unknown": {bin, []string{"nope"}, 255, "hint: did you mean demo?"},
		"option":  {bin, []string{"--", "-oProxyCommand=x"}, 255, "is not there"},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.Command(self, append([]string{"ssh"}, c.args...)...)
			cmd.Env = append(os.Environ(), "HELIX_STATE="+f.state, "PATH="+c.path)
			out, _ := cmd.CombinedOutput() // the code is what is looked at
			if got := cmd.ProcessState.ExitCode(); got != c.code || !strings.Contains(string(out), c.want) {
				t.Errorf("exit code %d, said %q; want %d, %q", got, out, c.code, c.want)
			}
		})
	}
}
