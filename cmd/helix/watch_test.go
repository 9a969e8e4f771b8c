//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/creack/pty"

	"helix.local/helix/gateway/api"
)

// until calls then when text has been written to it.
type until struct {
	text string
	then func()

	mu  sync.Mutex
	all strings.Builder
}

func (u *until) Write(p []byte) (int, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	before := strings.Contains(u.all.String(), u.text)
	u.all.Write(p)
	if !before && strings.Contains(u.all.String(), u.text) {
		u.then()
	}
	return len(p), nil
}

func (u *until) String() string {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.all.String()
}

func TestOutlook(t *testing.T) {
	state := func(s, stage string) api.Event { return api.Event{Kind: kindState, State: s, Stage: stage} }
	gone := api.Event{Kind: kindDeleted}
	for name, c := range map[string]struct {
		o      outlook
		events []api.Event
		want   string // "settled", "" for no end, or the error
	}{
		"start":               {outlook{until: stateRunning}, []api.Event{state(stateStarting, "boot"), {Kind: "ports"}, state(stateRunning, "")}, "settled"},
		"start goes on":       {outlook{until: stateRunning}, []api.Event{state(stateStarting, "boot")}, ""},
		"start fails":         {outlook{until: stateRunning}, []api.Event{state(stateStarting, "boot"), {Kind: kindState, State: stateFailed, Message: "no init"}}, "stage boot: no init"},
		"failure's own stage": {outlook{until: stateRunning}, []api.Event{state(stateStarting, "boot"), {Kind: kindState, State: stateFailed, Stage: "pair", Message: "late"}}, "stage pair: late"},
		"stopped meanwhile":   {outlook{until: stateRunning}, []api.Event{state(stateStarting, "boot"), state(stateStopping, "")}, "stage boot: the workspace was stopped meanwhile"},
		"removed meanwhile":   {outlook{until: stateRunning}, []api.Event{state(stateStarting, "boot"), gone}, "stage boot: the workspace was removed meanwhile"},
		"stop":                {outlook{until: stateStopped}, []api.Event{state(stateStopping, ""), state(stateStopped, "")}, "settled"},
		"stop of a start":     {outlook{until: stateStopped}, []api.Event{state(stateStarting, "boot"), state(stateStopping, ""), state(stateStopped, "")}, "settled"},
		"stop fails":          {outlook{until: stateStopped}, []api.Event{state(stateStopping, ""), {Kind: kindState, State: stateFailed, Message: "stuck"}}, "stuck"},
		"restart":             {outlook{until: stateRunning, again: true}, []api.Event{state(stateRunning, ""), state(stateStopping, ""), state(stateStopped, ""), state(stateStarting, "boot"), state(stateRunning, "")}, "settled"},
		"restart is no start": {outlook{until: stateRunning, again: true}, []api.Event{state(stateRunning, "")}, ""},
		"restart, stopped":    {outlook{until: stateRunning, again: true}, []api.Event{state(stateStopping, ""), state(stateStopped, ""), state(stateStarting, "boot"), state(stateStopping, "")}, "stage boot: the workspace was stopped meanwhile"},
	} {
		t.Run(name, func(t *testing.T) {
			c.o.doing = "do"
			got := ""
			for i, e := range c.events {
				err := c.o.see(e)
				if err == nil {
					continue
				}
				if i != len(c.events)-1 {
					t.Fatalf("event %d of %d ended it: %v", i, len(c.events), err)
				}
				got = strings.TrimPrefix(err.Error(), "do: ")
			}
			if got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

func TestLifecycle(t *testing.T) {
	f := newFake(t)
	f.console["bad"] = "Kernel panic\x1b[0m\r\nattempted to kill init\r\n"
	f.listen(t)
	steps := []struct {
		name, args     string
		failing        bool
		code           int
		stdout, stderr string
	}{
		{"create", "create demo --dir . --service app=5173", false, 0, "demo is ready\n\n  helix ssh demo\n  https://demo.helix.local", "  prepare         1.00 s\nwarning: no KVM here\nhint: use a machine with it\n  boot            2.00 s\n"},
		{"taken", "create demo --dir .", false, 4, "", "helix: create \"demo\": workspace \"demo\" is there already\nhint: choose another name\n"},
		{"warned", "restart demo", false, 0, "demo is ready", "warning: no KVM here\nhint: use a machine with it\n"},
		{"start of a running one", "start demo", false, 0, "demo is ready", ""},
		{"stop", "stop demo", false, 0, "demo is stopped; start it: helix start demo", "  stop            1.00 s\n"},
		{"stop without waiting", "stop demo --no-wait", false, 0, "demo is stopping", ""},
		{"start", "start demo --json", false, 0, `"state": "running"`, "health"},
		{"not started", "create idle --dir . --no-start", false, 0, "idle is stopped; start it: helix start idle", ""},
		{"not waited for", "create soon --image tiny --no-wait", false, 0, "soon is running", ""},
		{"unknown", "stop nope", false, 3, "", "helix: stop \"nope\": workspace \"nope\" is not there\nhint: did you mean demo?\n"},
		{"failed", "create bad --image tiny", true, 6, "", "  boot            1.00 s  failed\nhelix: create \"bad\": stage boot: the guest has no init\n  | Kernel panic^[[0m\n  | attempted to kill init\nhint: rebuild the image\n"},
		{"failed without a console", "start idle", true, 6, "", "failed\nhelix: start \"idle\": stage boot: the guest has no init\nhint: rebuild the image\n"},
	}
	for _, s := range steps {
		t.Run(s.name, func(t *testing.T) {
			f.startEvents = nil
			if s.failing {
				f.startEvents = []api.Event{
					{State: stateStarting, Stage: "boot"},
					{State: stateFailed, Stage: "boot", Message: "the guest has no init", Hint: "rebuild the image"},
				}
			}
			got := call{state: f.state}.run(t.Context(), strings.Fields(s.args)...)
			ok := strings.Contains(got.stdout, s.stdout) && strings.Contains(got.stderr, s.stderr)
			if s.name == "not waited for" {
				ok = strings.Contains(got.stdout, "soon is ")
			}
			if got.code != s.code || !ok || (s.code != 0 && got.stdout != "") {
				t.Errorf("got code %d\nstdout: %s\nstderr: %s\nwant %d\nstdout: %s\nstderr: %s", got.code, got.stdout, got.stderr, s.code, s.stdout, s.stderr)
			}
		})
	}
	ws, err := f.Workspace(t.Context(), "demo")
	dir, _ := os.Getwd()
	if err != nil || ws.Targets[0].Dir != dir || ws.Services[0] != (api.Service{Name: "app", Port: 5173}) {
		t.Errorf("created as %+v, %v", ws, err)
	}
}

func TestGatewayDiesWhileWaiting(t *testing.T) {
	f := newFake(t)
	f.hold = make(chan struct{})
	f.startEvents = []api.Event{{State: stateStarting, Stage: "boot"}}
	f.listen(t)
	defer close(f.hold)
	// The second stage shows that the first one has been seen.
	first, second := api.Event{Kind: kindState, Workspace: "demo", State: stateStarting, Stage: "pair"}, make(chan struct{})
	w := &until{text: "boot", then: func() { close(second) }}
	done := make(chan result)
	go func() {
		a := &app{stdout: w, stderr: w, getenv: func(string) string { return f.state }}
		code := a.run(t.Context(), []string{"create", "demo", "--dir", "."})
		done <- result{stdout: w.String(), code: code}
	}()
	awaitWorkspace(t, f, "demo")
	f.emit(first)
	<-second
	f.close()
	got := <-done
	if got.code != exitNoGateway || !strings.Contains(got.stdout, `create "demo": the gateway went away at stage pair`) || !strings.Contains(got.stdout, "helix status demo") {
		t.Errorf("got %+v", got)
	}
}

func awaitWorkspace(t *testing.T, f *fakeGateway, name string) {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	for f.all[name].Targets == nil || f.all[name].Targets[0].State != stateStarting {
		f.changed.Wait()
	}
}

func TestInterrupted(t *testing.T) {
	f := newFake(t)
	f.hold = make(chan struct{})
	f.listen(t)
	defer close(f.hold)
	ctx, cancel := context.WithCancelCause(t.Context())
	w := &until{text: "never", then: func() {}}
	done := make(chan int)
	go func() {
		a := &app{stdout: w, stderr: w, getenv: func(string) string { return f.state }}
		done <- a.run(ctx, []string{"create", "demo", "--dir", "."})
	}()
	awaitWorkspace(t, f, "demo")
	cancel(signalError{2})
	if code := <-done; code != 130 {
		t.Errorf("exit code %d, want 130", code)
	}
	if want := "helix: create \"demo\": interrupt\nhint: it goes on without this command; see: helix status demo\n"; !strings.HasSuffix(w.String(), want) {
		t.Errorf("got %q, want %q", w.String(), want)
	}
}

func TestProgressOnTerminal(t *testing.T) {
	f := newFake(t).listen(t)
	ptmx, tty, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer ptmx.Close()
	if err := pty.Setsize(ptmx, &pty.Winsize{Rows: 24, Cols: 80}); err != nil {
		t.Fatal(err)
	}
	shown := make(chan string)
	go func() {
		var all strings.Builder
		buf := make([]byte, 4096)
		for {
			n, err := ptmx.Read(buf)
			all.Write(buf[:n])
			if err != nil { // EIO: the last one has closed the terminal
				shown <- all.String()
				return
			}
		}
	}()
	for _, args := range [][]string{{"create", "demo", "--dir", "."}, {"image", "build", "tiny"}, {"image", "build", "nope"}} {
		var stdout strings.Builder
		a := &app{stdout: &stdout, stderr: tty, getenv: func(string) string { return f.state }}
		if code := a.run(t.Context(), args); code != 0 && args[2] != "nope" {
			t.Errorf("%v: exit code %d", args, code)
		}
	}
	if err := tty.Close(); err != nil {
		t.Fatal(err)
	}
	got := <-shown
	for _, want := range []string{"prepare", "boot            2.00 s", "health          1.00 s", "warning: no KVM here", "initramfs", "Linux 6.1", "failed"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is not shown in %q", want, got)
		}
	}
}

func TestFullOutput(t *testing.T) {
	f := furnished(t)
	a := &app{stdout: failingWriter{}, stderr: &strings.Builder{}, getenv: func(string) string { return f.state }}
	for _, args := range []string{"ls", "status", "version", "status demo --json", "help", "logs demo"} {
		if code := a.run(t.Context(), strings.Fields(args)); code != exitOther {
			t.Errorf("%s: exit code %d with a full disk, want 1", args, code)
		}
	}
}

type failingWriter struct{}

func (failingWriter) Write([]byte) (int, error) { return 0, errors.New("no space left on device") }

func TestExitCode(t *testing.T) {
	for want, errs := range map[int][]error{
		exitOther:       {errors.New("x"), &api.Error{Code: api.CodeInternal}},
		exitUsage:       {usagef("", "x"), &api.Error{Code: api.CodeInvalid}},
		exitNotFound:    {&api.Error{Code: api.CodeNotFound}, &codedError{code: api.CodeNotFound}},
		exitConflict:    {&api.Error{Code: api.CodeConflict}, errors.Join(&api.Error{Code: api.CodeConflict})},
		exitNoGateway:   {api.ErrNoGateway},
		exitUnavailable: {&api.Error{Code: api.CodeUnavailable}, &failedError{}},
		143:             {signalError{15}},
		7:               {&exitError{code: 7}},
	} {
		for _, err := range errs {
			a := &app{stderr: &strings.Builder{}, getenv: os.Getenv}
			if got := a.report(fmt.Errorf("wrapped: %w", err)); got != want {
				t.Errorf("%T: exit code %d, want %d", err, got, want)
			}
		}
	}
}
