package main

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Exit codes and messages of the program as it ships.
func TestProgram(t *testing.T) {
	t.Parallel()
	program := filepath.Join(t.TempDir(), "helix-agent")
	build := exec.Command("go", "build", "-ldflags=-X main.version=1.2.3", "-o", program, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for name, c := range map[string]struct {
		args           []string
		stdin          string
		code           int
		stdout, stderr string
	}{
		"version":   {args: []string{"version"}, stdout: "1.2.3\n"},
		"nothing":   {code: 2, stderr: "usage: helix-agent COMMAND"},
		"unknown":   {args: []string{"frobnicate"}, code: 2, stderr: "usage"},
		"too many":  {args: []string{"dir", "x"}, code: 2, stderr: "usage"},
		"no link":   {args: []string{"dir"}, code: 1, stderr: "helix-agent: open the link"},
		"sftp ends": {args: []string{"sftp-server"}},
	} {
		cmd := exec.Command(program, c.args...)
		var stdout, stderr bytes.Buffer
		cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(c.stdin), &stdout, &stderr
		code := 0
		if exit, ok := errors.AsType[*exec.ExitError](cmd.Run()); ok {
			code = exit.ExitCode()
		}
		if code != c.code || stdout.String() != c.stdout || !strings.Contains(stderr.String(), c.stderr) {
			t.Errorf("%s: code %d, %q, %q; want %d, %q, %q", name, code, stdout.String(), stderr.String(), c.code, c.stdout, c.stderr)
		}
	}
}
