//go:build linux

package e2e

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"helix.local/helix/gateway/api"
)

// startVMGateway makes a gateway that has the tiny image.
func startVMGateway(tb testing.TB) *gateway {
	tb.Helper()
	g := newGateway(tb)
	g.useImage()
	g.start()
	return g
}

// vmProcess finds the one process of a machine whose command line has kind in it.
func (g *gateway) vmProcess(name, kind string) int {
	g.t.Helper()
	var pid int
	for _, p := range processesOf(filepath.Join(g.state, "vm", name) + "/") {
		if number, line, _ := strings.Cut(p, " "); strings.Contains(line, kind) {
			if _, err := fmt.Sscan(number, &pid); err != nil {
				g.t.Fatal(err)
			}
		}
	}
	if pid == 0 {
		g.t.Fatalf("no process %s of %s in %v", kind, name, processesOf(g.state))
	}
	return pid
}

// gone waits until nothing of the machine runs.
func (g *gateway) gone(name string) {
	g.t.Helper()
	eventually(g.t, time.Minute, "end of all processes of "+name, func() bool {
		return len(processesOf(filepath.Join(g.state, "vm", name)+"/")) == 0
	})
}

// state waits until the workspace is in one of the states.
func (g *gateway) awaitState(name string, states ...string) api.Target {
	g.t.Helper()
	var target api.Target
	eventually(g.t, 2*time.Minute, fmt.Sprintf("%s in %v", name, states), func() bool {
		target = g.target(name)
		return slices.Contains(states, target.State)
	})
	return target
}

func TestVM(t *testing.T) {
	g := startVMGateway(t)
	t.Run("starting is said", func(t *testing.T) {
		g.must("create", "soon", "--image", "tiny", "--no-wait")
		if r := g.get("soon", "", "-i", "--http1.1"); !strings.Contains(r.out, "503") || !strings.Contains(strings.ToLower(r.out), "x-helix-reason: starting") {
			t.Errorf("page while it starts: %.500q", r.out)
		}
		if r := g.ssh(nil, "soon", "true"); r.code != 255 || !strings.Contains(r.err, `workspace "soon" is starting`) {
			t.Errorf("ssh while it starts: code %d, %q", r.code, r.err)
		}
		g.must("rm", "soon")
	})
	r := g.helix("create", "demo", "--image", "tiny")
	if r.code != 0 {
		t.Fatalf("create: %d %s", r.code, r.err)
	}
	for _, stage := range []string{"prepare", "disk", "shim", "qemu", "network", "boot", "health"} {
		if !strings.Contains(r.err, stage) {
			t.Errorf("create did not show stage %q:\n%s", stage, r.err)
		}
	}
	t.Run("ssh", func(t *testing.T) { testSSH(t, g, "demo") })
	t.Run("copies", func(t *testing.T) { testCopies(t, g, "demo") })
	t.Run("half-close", func(t *testing.T) { testHalfClose(t, g, "demo") })
	t.Run("nothing listens", func(t *testing.T) { testRefused(t, g, "demo") })
	t.Run("users", func(t *testing.T) {
		for args, want := range map[string]string{"helix": "helix /workspace", "root": "root "} {
			got := g.must("exec", "-u", args, "demo", "--", "sh", "-c", "echo $(id -un) $PWD")
			if !strings.HasPrefix(got, want) {
				t.Errorf("as %s: %q, want %q", args, got, want)
			}
		}
	})
	t.Run("side by side with a directory", func(t *testing.T) {
		folder := g.dir("site")
		if err := os.WriteFile(filepath.Join(folder, "index.html"), []byte("from the folder"), 0o644); err != nil {
			t.Fatal(err)
		}
		g.must("exec", "site", "--", "sh", "-c", `busybox httpd -p "$HELIX_ADDR:8080"`)
		g.must("exec", "demo", "--", "sh", "-c", "mkdir -p www; echo -n from the machine >www/index.html; busybox httpd -p 8080 -h www")
		testWeb(t, g, "site", "from the folder", 8080)
		testWeb(t, g, "demo", "from the machine", 8080)
	})
	t.Run("secret is spent", func(t *testing.T) { testSecret(t, g, "demo") })
	t.Run("only loopback listens", func(t *testing.T) { testListeners(t, g, "demo") })
	t.Run("plan and console", func(t *testing.T) {
		var plan struct{ Args []string }
		g.json(&plan, "vm", "plan", "demo")
		if len(plan.Args) == 0 || strings.Contains(strings.Join(plan.Args, " "), "hostfwd") {
			t.Errorf("plan: %v", plan.Args)
		}
		if log := g.must("logs", "demo"); !strings.Contains(log, "helix-agent:") {
			t.Errorf("console: %q", log)
		}
	})
	t.Run("the workspace folder outlives a stop", func(t *testing.T) {
		before := g.hostKey("demo")
		g.must("exec", "demo", "--", "sh", "-c", "echo kept >/workspace/kept")
		g.must("stop", "demo")
		g.gone("demo")
		if left := runFiles(t, g, "demo"); len(left) > 0 {
			t.Errorf("left in the run folder: %v", left)
		}
		g.must("start", "demo")
		if got := g.must("exec", "demo", "--", "cat", "/workspace/kept"); got != "kept\n" {
			t.Errorf("kept file: %q", got)
		}
		if string(g.hostKey("demo")) != string(before) {
			t.Error("the host key changed")
		}
	})
	t.Run("the link dies under a download", func(t *testing.T) { g.startPeer("demo"); testCutDownload(t, g, "demo") })
	t.Run("delete from running, then again", func(t *testing.T) {
		g.must("rm", "demo")
		g.gone("demo")
		if r := g.helix("rm", "demo"); r.code != 3 {
			t.Errorf("second rm: exit %d, want 3: %s", r.code, r.err)
		}
		if _, err := os.Stat(filepath.Join(g.state, "vm", "demo")); !os.IsNotExist(err) {
			t.Errorf("run folder: %v", err)
		}
	})
}

// runFiles are the files of a machine that must be gone when it does not run.
func runFiles(t *testing.T, g *gateway, name string) []string {
	t.Helper()
	return slices.DeleteFunc(files(t, filepath.Join(g.state, "vm", name)), func(f string) bool {
		return slices.Contains([]string{".", "workspace.img", "plan.json", "exit.json", "shim.log"}, f) || strings.HasPrefix(f, "console.log")
	})
}

// testSecret looks for the bootstrap secret where it must not be, and uses it a second time.
func testSecret(t *testing.T, g *gateway, name string) {
	var boot struct{ Token string }
	text := g.must("exec", "-u", "root", name, "--", "cat", "/sys/firmware/qemu_fw_cfg/by_name/opt/helix/boot/raw")
	if err := json.Unmarshal([]byte(text), &boot); err != nil || len(boot.Token) < 40 {
		t.Fatalf("boot item: %v, %d characters of secret", err, len(boot.Token))
	}
	if out, _ := exec.Command("grep", "-rlaF", boot.Token, g.state, "--exclude=workspace.img").CombinedOutput(); len(out) > 0 {
		t.Errorf("the secret is in files: %s", out)
	}
	for _, p := range processesOf(boot.Token) {
		t.Errorf("the secret is in a command line: %s", p)
	}
	for _, command := range [][]string{{"status", name, "--json"}, {"logs", name}, {"vm", "plan", name, "--json"}} {
		if strings.Contains(g.must(command...), boot.Token) {
			t.Errorf("helix %v shows the secret", command)
		}
	}
	for _, e := range g.events(name) {
		if strings.Contains(fmt.Sprint(e), boot.Token) {
			t.Errorf("an event shows the secret: %s", e.Kind)
		}
	}
	if strings.Contains(g.said(), boot.Token) {
		t.Error("the secret is in the gateway's log")
	}
	if got := secondUse(t, g, name, boot.Token); got != "token used or wrong" {
		t.Errorf("second use: %q", got)
	}
	if !strings.Contains(g.said(), "agent refused") {
		t.Error("the second use is not in the log")
	}
	if !slices.ContainsFunc(g.events(name), func(e api.Event) bool { return e.Kind == "refused" }) {
		t.Error("the second use is no event")
	}
}

// events are the stored ones of a workspace. A mark at the end says when all
// have come: what is asked of the workspace last.
func (g *gateway) events(name string) []api.Event {
	g.t.Helper()
	c := api.NewClient(filepath.Join(g.state, "api.sock"))
	defer c.Close()
	enough := errors.New("enough")
	var last uint64
	if err := c.Events(g.t.Context(), api.New, "", func() { // the next event is the mark
		r := g.helix("create", "mark", "--dir", g.state, "--no-start")
		_ = g.helix("rm", "mark")
		if r.code != 0 {
			g.t.Errorf("mark: %s", r.err)
		}
	}, func(e api.Event) error { last = e.Seq; return enough }); !errors.Is(err, enough) {
		g.t.Fatal(err)
	}
	var list []api.Event
	if err := c.Events(g.t.Context(), 0, "", nil, func(e api.Event) error {
		if e.Seq >= last {
			return enough
		}
		if e.Workspace == name {
			list = append(list, e)
		}
		return nil
	}); !errors.Is(err, enough) {
		g.t.Fatal(err)
	}
	return list
}

// testListeners looks for sockets of the gateway, the shim and QEMU on any
// address but loopback.
func testListeners(t *testing.T, g *gateway, name string) {
	pids := []int{g.cmd.Process.Pid, g.vmProcess(name, "vmshim"), g.vmProcess(name, "qemu-system")}
	r := do(t, nil, nil, "ss", "-Hltnup")
	for line := range strings.Lines(r.out) {
		ours := slices.ContainsFunc(pids, func(pid int) bool { return strings.Contains(line, fmt.Sprintf("pid=%d,", pid)) })
		if fields := strings.Fields(line); ours && !strings.HasPrefix(fields[4], "127.") {
			t.Errorf("listens beyond loopback: %s", line)
		}
	}
}

func TestTwoVMsOnPort80(t *testing.T) {
	g := startVMGateway(t)
	for _, name := range []string{"one", "two"} {
		g.must("create", name, "--image", "tiny")
		g.must("exec", "-u", "root", name, "--", "sh", "-c", "mkdir -p /tmp/www; echo -n "+name+" >/tmp/www/index.html; busybox httpd -p 80 -h /tmp/www")
	}
	for _, name := range []string{"one", "two"} {
		eventually(t, time.Minute, "page", func() bool { return g.get(name, "").out == name })
	}
}

func TestGatewayKilledVMGoesOn(t *testing.T) {
	g := startVMGateway(t)
	g.must("create", "demo", "--image", "tiny")
	booted := g.must("exec", "demo", "--", "cat", "/proc/sys/kernel/random/boot_id")
	for range 2 {
		g.crash()
		g.start()
		eventually(t, time.Minute, "route", func() bool { return g.helix("exec", "demo", "--", "true").code == 0 })
		if again := g.must("exec", "demo", "--", "cat", "/proc/sys/kernel/random/boot_id"); again != booted {
			t.Fatal("the guest booted anew")
		}
	}
	for _, victims := range [][]string{{"qemu-system"}, {"vmshim"}} {
		t.Run("kill "+victims[0], func(t *testing.T) {
			for _, v := range victims {
				g.kill(g.vmProcess("demo", v))
			}
			if target := g.awaitState("demo", "failed", "stopped"); target.Reason == "" {
				t.Errorf("no reason: %+v", target)
			}
			g.gone("demo")
			g.must("start", "demo")
		})
	}
	t.Run("kill gateway and qemu", func(t *testing.T) {
		qemu := g.vmProcess("demo", "qemu-system")
		g.crash()
		g.kill(qemu)
		g.gone("demo")
		g.start()
		if target := g.awaitState("demo", "failed", "stopped"); target.Reason == "" {
			t.Errorf("no reason: %+v", target)
		}
		g.must("start", "demo")
	})
	t.Run("numbers in files kill nobody", func(t *testing.T) {
		bystander := exec.Command("sleep", "600")
		if err := bystander.Start(); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = bystander.Process.Kill(); _ = bystander.Wait() }()
		number := fmt.Sprint(bystander.Process.Pid)
		qemu, shim := g.vmProcess("demo", "qemu-system"), g.vmProcess("demo", "vmshim")
		g.crash()
		g.kill(shim)
		g.gone("demo")
		_ = qemu // died with its shim
		for _, file := range []string{"lock", "vm/demo/shim.lock", "vm/demo/shim.pid", "vm/demo/qemu.pid", "vm/demo/pid"} {
			if err := os.WriteFile(filepath.Join(g.state, file), []byte(number), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		g.start()
		g.awaitState("demo", "failed", "stopped")
		g.must("start", "demo")
		g.must("rm", "demo")
		if err := bystander.Process.Signal(syscall.Signal(0)); err != nil {
			t.Errorf("the bystander is gone: %v", err)
		}
	})
}

// TestGatewayKilledInEveryStage kills the gateway while a start is in each of
// its stages. The next gateway brings the start to an end.
func TestGatewayKilledInEveryStage(t *testing.T) {
	g := startVMGateway(t)
	g.must("create", "demo", "--image", "tiny", "--no-start")
	for _, stage := range []string{"prepare", "disk", "shim", "qemu", "network", "boot", "health"} {
		t.Run(stage, func(t *testing.T) {
			seen := g.watch("demo", func(e api.Event) bool { return e.State == "starting" && e.Stage == stage || e.State == "running" })
			g.must("start", "demo", "--no-wait")
			<-seen
			g.crash()
			g.start()
			target := g.awaitState("demo", "running", "failed", "stopped")
			if target.State == "running" {
				if got := g.must("exec", "demo", "--", "echo", "alive"); got != "alive\n" {
					t.Errorf("running, but exec says %q", got)
				}
				g.must("stop", "demo")
			}
			g.gone("demo")
			if left := runFiles(t, g, "demo"); len(left) > 0 {
				t.Errorf("%s: left in the run folder: %v", target.State, left)
			}
		})
	}
}

// watch returns a channel that closes at the first event that is wanted. The
// watch stands when it returns.
func (g *gateway) watch(name string, wanted func(api.Event) bool) <-chan struct{} {
	g.t.Helper()
	c := api.NewClient(filepath.Join(g.state, "api.sock"))
	begun, seen := make(chan struct{}), make(chan struct{})
	go func() {
		defer c.Close()
		var once bool
		_ = c.Events(g.t.Context(), api.New, name, func() { close(begun) }, func(e api.Event) error { // ends with the gateway
			if !once && wanted(e) {
				once = true
				close(seen)
			}
			return nil
		})
	}()
	<-begun
	return seen
}

func TestShimThatDoesNotAnswer(t *testing.T) {
	g := startVMGateway(t)
	g.must("create", "demo", "--image", "tiny")
	shim := g.vmProcess("demo", "vmshim")
	if err := syscall.Kill(shim, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	g.crash()
	g.start()
	if target := g.awaitState("demo", "unknown"); target.Reason == "" || target.Hint == "" {
		t.Errorf("unknown without a reason or hint: %+v", target)
	}
	if pid := g.vmProcess("demo", "vmshim"); pid != shim {
		t.Error("somebody ended a machine whose state is not known")
	}
	g.must("stop", "demo") // a person says so
	g.gone("demo")
	g.must("start", "demo")
	if got := g.must("exec", "demo", "--", "echo", "again"); got != "again\n" {
		t.Errorf("exec: %q", got)
	}
}

func TestOneNameFromManySides(t *testing.T) {
	g := startGateway(t)
	folder := t.TempDir()
	var work sync.WaitGroup
	for range 4 {
		work.Go(func() {
			for range 10 { // conflicts are fine, anything left over is not
				for _, c := range [][]string{{"create", "demo", "--dir", folder}, {"restart", "demo"}, {"stop", "demo"}, {"start", "demo"}, {"rm", "demo"}} {
					if r := g.helix(c...); r.code == 1 || strings.Contains(r.err, "panic") {
						t.Errorf("helix %v: exit %d: %s", c, r.code, r.err)
					}
				}
			}
		})
	}
	work.Wait()
	_ = g.helix("rm", "demo") // gone already, or not
	g.must("create", "demo", "--dir", folder)
	if got := g.must("exec", "demo", "--", "echo", "fine"); got != "fine\n" {
		t.Errorf("exec: %q", got)
	}
}

func TestRemoveFromEveryState(t *testing.T) {
	g := startVMGateway(t)
	for _, stage := range []string{"shim", "boot", "health"} {
		seen := g.watch("demo", func(e api.Event) bool { return e.Stage == stage })
		g.must("create", "demo", "--image", "tiny", "--no-wait")
		<-seen
		g.must("rm", "demo")
		g.gone("demo")
	}
	g.must("create", "demo", "--image", "tiny", "--no-start")
	g.must("rm", "demo")
	g.must("create", "demo", "--image", "tiny")
	g.kill(g.vmProcess("demo", "qemu-system"))
	g.awaitState("demo", "failed")
	g.must("rm", "demo")
	g.must("create", "demo", "--image", "tiny", "--no-start") // the name is free at once
	if left := processesOf(filepath.Join(g.state, "vm")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestNothingIsLeftAfterManyWorkspaces(t *testing.T) {
	g := startVMGateway(t)
	g.dir("warm-up") // both kinds have had their folder and their first time
	g.must("create", "warm-up-vm", "--image", "tiny")
	g.must("rm", "warm-up", "warm-up-vm")
	folder := t.TempDir()
	pid := g.cmd.Process.Pid
	before, threads := descriptors(t, pid), files(t, g.state)
	for i := range 100 {
		name := fmt.Sprint("dir-", i)
		g.must("create", name, "--dir", folder)
		g.must("rm", name)
	}
	for i := range 5 {
		name := fmt.Sprint("vm-", i)
		g.must("create", name, "--image", "tiny", "--memory", "256M")
		g.must("rm", name)
	}
	eventually(t, 30*time.Second, "descriptors at the base line", func() bool { return descriptors(t, pid) <= before+2 })
	if after := files(t, g.state); len(after) > len(threads) {
		t.Errorf("files left: %v", slices.DeleteFunc(after, func(f string) bool { return slices.Contains(threads, f) }))
	}
	if left := slices.DeleteFunc(processesOf(g.state), func(p string) bool { return strings.Contains(p, " up ") }); len(left) > 0 {
		t.Errorf("processes left: %v", left)
	}
	if err := g.cmd.Process.Signal(syscall.SIGQUIT); err != nil { // the stacks of all goroutines go to the log
		t.Fatal(err)
	}
	_ = g.cmd.Wait() // ended by the signal
	g.cmd = nil
	count := 0
	for lines := bufio.NewScanner(strings.NewReader(g.said())); lines.Scan(); {
		if strings.HasPrefix(lines.Text(), "goroutine ") && strings.HasSuffix(lines.Text(), ":") {
			count++
		}
		if strings.Contains(lines.Text(), "gateway.(*instance)") || strings.Contains(lines.Text(), "tunnel.(*Session)") {
			t.Errorf("still about: %s", lines.Text())
		}
	}
	if count == 0 || count > 80 {
		t.Errorf("%d goroutines at the end", count)
	}
}
