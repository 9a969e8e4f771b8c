package gateway

import (
	"errors"
	"strings"
	"testing"
	"time"

	"helix.local/helix/agent/wire"
	"helix.local/helix/gateway/web"
	"helix.local/helix/tunnel"
	"helix.local/helix/workspaces"
)

func TestNotRunningTellsStatesApart(t *testing.T) {
	cases := map[workspaces.State]struct {
		reason web.Reason
		text   string
	}{
		workspaces.Starting: {web.ReasonStarting, `workspace "demo" is starting (boot)`},
		workspaces.Failed:   {web.ReasonFailed, `workspace "demo" has failed: disk full`},
		workspaces.Running:  {web.ReasonTunnelDown, `workspace "demo" runs, but its agent is not connected`},
		workspaces.Unknown:  {web.ReasonTunnelDown, `workspace "demo" runs, but its agent is not connected`},
		workspaces.Stopped:  {web.ReasonStopped, `workspace "demo" is stopped`},
		workspaces.Stopping: {web.ReasonStopped, `workspace "demo" is stopping`},
		workspaces.Deleting: {web.ReasonStopped, `workspace "demo" is deleting`},
	}
	for state, c := range cases {
		got := notRunning("demo", workspaces.Target{State: state, Stage: workspaces.StageBoot, Reason: "disk full"})
		if got.Reason != c.reason || got.Message != c.text {
			t.Errorf("%s: got %s %q, want %s %q", state, got.Reason, got.Message, c.reason, c.text)
		}
		if got.Cure == "" || strings.Contains(got.Line(), "\n") {
			t.Errorf("%s: line %q has no cure or is no line", state, got.Line())
		}
	}
}

func TestUnknownSuggestsTheNearest(t *testing.T) {
	got := unknown("dmeo", &workspaces.NotFoundError{What: "workspace", Name: "dmeo", Nearest: "demo"})
	if got.Nearest != "demo" || !strings.Contains(got.Line(), `did you mean "demo"`) {
		t.Errorf("got %+v", got)
	}
}

func TestFind(t *testing.T) {
	g := &Gateway{zones: []string{"helix.local", "helix.internal"}}
	cases := map[string]struct {
		name string
		ok   bool
	}{
		"demo":                    {"demo", true},
		"demo.helix.local":        {"demo", true},
		"demo.helix.internal":     {"demo", true},
		"DEMO.helix.local.":       {"demo", true},
		"5173.demo.helix.local":   {"demo", true},
		"a.b.demo.helix.local":    {"demo", true},
		"gw.helix.local":          {"gw", true},
		"demo.example.org":        {"", false},
		"127.0.0.1":               {"", false},
		"":                        {"", false},
		"demo.helix.local.evil.x": {"", false},
	}
	for host, c := range cases {
		got, ok := g.find(host)
		if ok != c.ok || got.Workspace != c.name {
			t.Errorf("%q: got %q %v, want %q %v", host, got.Workspace, ok, c.name, c.ok)
		}
	}
}

func TestJudge(t *testing.T) {
	now := time.Now()
	good := wire.Health{OK: true, Generation: 3, Time: now, Checks: []wire.Check{{Name: wire.CheckSSH, OK: true}}}
	cases := map[string]struct {
		change func(*wire.Health)
		want   string // in the error, "" for none
	}{
		"good":         {func(*wire.Health) {}, ""},
		"check":        {func(h *wire.Health) { h.Checks[0] = wire.Check{Name: wire.CheckSSH, Error: "no identity"} }, "ssh: no identity"},
		"other start":  {func(h *wire.Health) { h.Generation = 2 }, "of start 2, not 3"},
		"clock behind": {func(h *wire.Health) { h.Time = now.Add(-1500 * time.Millisecond) }, "clock: off by 1.5s"},
		"clock ahead":  {func(h *wire.Health) { h.Time = now.Add(3 * time.Second) }, "clock: off by 2.99s"},
		"clock enough": {func(h *wire.Health) { h.Time = now.Add(-900 * time.Millisecond) }, ""},
		"not healthy":  {func(h *wire.Health) { h.OK = false }, "not healthy"},
	}
	for name, c := range cases {
		h := good
		h.Checks = append([]wire.Check(nil), good.Checks...)
		c.change(&h)
		err := judge(h, 3, now, now.Add(10*time.Millisecond))
		if (err == nil) != (c.want == "") || (err != nil && !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: got %v, want %q", name, err, c.want)
		}
	}
}

func TestInstanceEndsOnce(t *testing.T) {
	i := newInstance("demo", "main", "id", 1, discard)
	i.setUp()
	first := errors.New("first")
	i.end(first)
	i.end(errors.New("second"))
	if err := i.await(t.Context()); !errors.Is(err, first) {
		t.Errorf("await: %v, want the first reason", err)
	}
	if i.ready() {
		t.Error("an ended instance is ready")
	}
	if _, err := i.open(t.Context(), wire.OpenRequest{Service: wire.ServiceSSH}); !errors.Is(err, tunnel.ErrClosed) {
		t.Errorf("a stream to an ended instance: %v", err)
	}
}

func TestEpochGrowsAcrossGateways(t *testing.T) {
	a, b := newInstance("demo", "main", "id", 1, discard), newInstance("demo", "main", "id", 1, discard)
	last := uint64(0)
	for range 1000 {
		e := a.nextEpoch()
		if e <= last {
			t.Fatalf("epoch %d after %d", e, last)
		}
		last = e
	}
	if e := b.nextEpoch(); e < uint64(time.Now().Add(-time.Minute).UnixMilli()) {
		t.Errorf("a new gateway's epoch %d is older than the clock", e)
	}
}
