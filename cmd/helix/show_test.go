//go:build unix

package main

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"helix.local/helix/gateway/api"
)

// furnished is a gateway with one of everything.
func furnished(t *testing.T) *fakeGateway {
	f := newFake(t)
	demo := f.put("demo", "dir", stateRunning)
	demo.Targets[0].Dir, demo.Targets[0].Agent, demo.Targets[0].Links = "/home/me/demo", "9.9.9", []string{"unix"}
	demo.Services = []api.Service{{Name: "app", Port: 5173, Protocol: "http"}, {Name: "db", Port: 5432, Protocol: "tcp"}}
	demo.Ports = []api.Port{{Port: 5173, Address: "127.0.0.1", Process: "node\x1b[2J", URL: "https://5173.demo.helix.local:10443"}}
	f.all["demo"] = demo
	box := f.put("box", "vm", stateStarting)
	box.Targets[0].Stage, box.Targets[0].Image, box.Targets[0].CPUs, box.Targets[0].MemoryMB = "boot", "tiny", 2, 1536
	box.Targets[0].Reason, box.Targets[0].Policy = "first line\nsecond line", "internet"
	f.all["box"] = box
	f.all["bad"] = api.Workspace{Name: "bad", Broken: "the record is cut short"}
	f.console["demo"] = "one\ntwo\nthree\n"
	f.images = []api.Image{{Name: "tiny", Digest: "sha256:abc", Size: 30 << 20, Created: time.Unix(0, 0), Kernel: "6.1", Used: []string{"box"}}}
	f.logins = []api.Key{{Fingerprint: "SHA256:xyz", Type: "ssh-ed25519", Comment: "me@here"}}
	return f.listen(t)
}

func TestShow(t *testing.T) {
	f := furnished(t)
	for name, args := range map[string][]string{
		"ls": {"ls"}, "ls-json": {"ls", "--json"}, "status": {"status"}, "status-json": {"status", "--json"},
		"status-demo": {"status", "demo"}, "status-box": {"status", "box"}, "status-bad": {"status", "bad"},
		"status-demo-json": {"status", "demo", "--json"}, "ports": {"ports", "demo"}, "ports-json": {"ports", "demo", "--json"},
		"ports-none-json": {"ports", "box", "--json"}, "logs": {"logs", "demo"}, "logs-2": {"logs", "demo", "-n", "2"},
		"plan": {"vm", "plan", "box"}, "images": {"image", "ls"}, "images-json": {"image", "ls", "--json"},
		"keys": {"key", "ls"}, "keys-json": {"key", "ls", "--json"}, "ca": {"ca"}, "ca-json": {"ca", "--json"},
		"ssh-config": {"ssh-config"}, "ssh-config-json": {"ssh-config", "--json"}, "exit-codes": {"help", "exit-codes"},
		"help": {}, "help-create": {"help", "create"}, "complete": {"__complete", "rm", "demo", ""},
		"complete-open": {"__complete", "open", "demo", ""}, "complete-image": {"__complete", "create", "--image", ""},
		"complete-policy": {"__complete", "create", "--policy", ""}, "complete-second": {"__complete", "status", "demo", ""},
		"open-main": {"open", "demo", "--print"}, "open-port": {"open", "demo", "8080"}, "open-service": {"open", "demo", "app"},
		"open-tcp": {"open", "demo", "db"},
	} {
		t.Run(name, func(t *testing.T) {
			got := call{state: f.state}.run(t.Context(), args...)
			if got.code != 0 {
				t.Errorf("exit code %d: %s", got.code, got.stderr)
			}
			golden(t, name, f.state, got.stdout)
			if slices.Contains(args, "--json") && !json.Valid([]byte(got.stdout)) {
				t.Errorf("not one JSON document: %s", got.stdout)
			}
		})
	}
}

func TestChange(t *testing.T) {
	f := furnished(t)
	key := "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFbHQ4rJrXRxFHtqn3hXd8WQbJFSLyGUSFRAUkAqPHnh you@there"
	file := filepath.Join(t.TempDir(), "id.pub")
	if err := os.WriteFile(file, []byte("# mine\n"+key+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	secret := filepath.Join(t.TempDir(), "id")
	if err := os.WriteFile(secret, []byte("-----BEGIN OPENSSH PRIVATE KEY-----\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args           string
		stdin          string
		code           int
		stdout, stderr string
	}{
		{args: "key add " + file, stdout: "you@there may log in"},
		{args: "key add " + key, stdout: "you@there may log in"},
		{args: "key add -", stdin: key, stdout: "you@there may log in"},
		{args: "key add -", code: 2, stderr: "no key in -"},
		{args: "key add " + secret, code: 2, stderr: "private key\nhint: give the public key"},
		{args: "key add /nowhere/id.pub", code: 3, stderr: "no file /nowhere/id.pub"},
		{args: "key add garbage key", code: 2, stderr: "helix: add key: "},
		{args: "key rm you@there", stdout: "is removed"},
		{args: "key rm nobody", code: 3, stderr: `remove key "nobody"`},
		{args: "image build tiny", stdout: "image tiny is built: 30.0 MiB, sha256:abc", stderr: "kernel"},
		{args: "image build tiny --json", stdout: `"digest": "sha256:abc"`},
		{args: "image build nope", code: 3, stderr: "failed\nhelix: build image \"nope\": recipe"},
		{args: "image rm tiny nope", code: 3, stdout: "image tiny is removed", stderr: `remove image "nope"`},
		{args: "rm box nope bad", code: 3, stdout: "box is removed\nbad is removed", stderr: "helix: remove \"nope\": workspace \"nope\" is not there\nhint: did you mean demo?"},
		{args: "status nope", code: 3, stderr: "hint: did you mean demo?"},
		{args: "ports nope", code: 3},
		{args: "vm plan nope", code: 3},
		{args: "logs nope", code: 3},
		{args: "open nope", code: 3},
		{args: "open demo ap", code: 3, stderr: "hint: did you mean app?"},
		{args: "ssh-config --install --uninstall", code: 2},
	} {
		t.Run(c.args, func(t *testing.T) {
			got := call{state: f.state, stdin: c.stdin}.run(t.Context(), strings.Fields(c.args)...)
			if got.code != c.code || !strings.Contains(got.stdout, c.stdout) || !strings.Contains(got.stderr, c.stderr) {
				t.Errorf("got code %d\nstdout: %s\nstderr: %s\nwant %d, %q, %q", got.code, got.stdout, got.stderr, c.code, c.stdout, c.stderr)
			}
		})
	}
}

func TestUsage(t *testing.T) {
	for args, want := range map[string]string{
		"crate x":                        "did you mean: helix create",
		"image buld":                     "did you mean: helix image build",
		"vm":                             "",
		"help crate":                     "did you mean: helix create",
		"help exec":                      "",
		"create":                         "create: NAME is missing",
		"create x":                       "either --image or --dir",
		"create x y":                     `"y" is one argument too many`,
		"create x --dri .":               "unknown flag: --dri",
		"create x --dir . --image tiny":  "either --image or --dir",
		"create x --dir . --cpus -1":     "--cpus -1",
		"create x --dir . --memory 2T":   `--memory "2T" is not a size`,
		"create x --dir . --policy open": "internet, none",
		"create x --dir . --accel fast":  "auto, kvm, tcg",
		"create x --dir . --service app": `--service "app"`,
		"create x --dir . --service app=1/gopher": "gopher",
		"exec x ls":         "put -- before the command",
		"exec x":            "the command is missing",
		"exec x --":         "the command is missing",
		"exec -- ls":        "NAME is missing",
		"exec x y -- ls":    `"y" is one`,
		"proxy demo 0":      `"0" is no port`,
		"events --after=-2": "--after -2",
		"logs x -n -1":      "--lines -1",
		"open":              "NAME is missing",
		"rm":                "rm: NAME is missing",
		"status a b":        `"b" is one`,
	} {
		t.Run(args, func(t *testing.T) {
			got := call{state: "/nowhere"}.run(t.Context(), strings.Fields(args)...)
			code := exitUsage
			if want == "" {
				code = 0
			}
			if got.code != code || !strings.Contains(got.stderr, want) {
				t.Errorf("got code %d, stderr %q, want %d and %q", got.code, got.stderr, code, want)
			}
			if code != 0 && got.stdout != "" {
				t.Errorf("standard output has %q", got.stdout)
			}
		})
	}
}

func TestNoGateway(t *testing.T) {
	for _, args := range []string{
		"ls", "status", "status x", "create x --dir .", "create x --dir . --no-wait", "start x", "stop x", "restart x",
		"rm x", "logs x", "ports x", "open x", "events", "vm plan x", "image ls", "image rm x", "image build x", "key ls", "key rm x",
		"key add ssh-ed25519 x", "ssh-config", "ca", "exec x -- ls", "ssh x", "proxy x 22",
	} {
		t.Run(args, func(t *testing.T) {
			got := call{state: "/nowhere"}.run(t.Context(), strings.Fields(args)...)
			want := exitNoGateway
			switch strings.Fields(args)[0] {
			case "exec", "ssh":
				want = exitConnection
			case "proxy":
				want = exitOther
			}
			if got.code != want || !strings.Contains(got.stderr, "no gateway is running at /nowhere/") || !strings.Contains(got.stderr, "helix up") {
				t.Errorf("got code %d, stderr %q, want code %d", got.code, got.stderr, want)
			}
		})
	}
	long := call{state: "/" + strings.Repeat("x", 120)}.run(t.Context(), "ls")
	if long.code != exitOther || !strings.Contains(long.stderr, "hint: name a shorter folder") {
		t.Errorf("long path: %+v", long)
	}
	flag := call{}.run(t.Context(), "ls", "--state", "/no where")
	if !strings.Contains(flag.stderr, "hint: start it: helix up --state '/no where'") {
		t.Errorf("hint with --state: %s", flag.stderr)
	}
}

func TestSocketOfAnother(t *testing.T) {
	f := newFake(t).listen(t)
	if os.Geteuid() != 0 { // root may open every socket
		if err := os.Chmod(filepath.Join(f.state, "api.sock"), 0); err != nil {
			t.Fatal(err)
		}
		got := call{state: f.state}.run(t.Context(), "ls")
		if got.code != exitOther || !strings.Contains(got.stderr, "belongs to another user") {
			t.Errorf("got %+v", got)
		}
	}
}

func TestEvents(t *testing.T) {
	f := newFake(t)
	f.put("demo", "dir", stateStopped)
	f.emit(api.Event{Kind: "created", Workspace: "demo"})
	f.emit(api.Event{Kind: kindState, Workspace: "demo", State: stateStarting, Stage: "boot"})
	f.emit(api.Event{Kind: kindState, Workspace: "other", State: stateRunning})
	f.emit(api.Event{Kind: kindWarning, Workspace: "demo", Message: "slow\x07", Hint: "wait"})
	f.listen(t)
	for name, args := range map[string][]string{
		"events": {"events", "--after", "0", "demo"}, "events-all": {"events", "-f", "--after", "2"}, "events-json": {"events", "--after", "0", "--json"},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancelCause(t.Context())
			seen := &until{text: "slow", then: func() { cancel(signalError{2}) }}
			a := &app{stdout: seen, stderr: seen, getenv: func(string) string { return f.state }}
			if code := a.run(ctx, args); code != 130 {
				t.Errorf("exit code %d, want 130", code)
			}
			golden(t, name, f.state, seen.String())
		})
	}
}
