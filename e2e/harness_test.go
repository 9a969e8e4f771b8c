//go:build linux

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"helix.local/helix/gateway/api"
)

// bin is the folder with helix, helix-agent and peer.
var bin string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	scratch, err := os.MkdirTemp("", "hx")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(scratch)
	if bin = os.Getenv("HELIX_E2E_BIN"); bin == "" {
		bin = scratch
		if err := build(scratch); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	seed.dir = filepath.Join(scratch, "seed")
	return m.Run()
}

// build makes the programs as "make build" does, and the peer.
func build(into string) error {
	for _, p := range []string{"../cmd/helix", "../cmd/helix-agent", "./peer"} {
		cmd := exec.Command("go", "build", "-ldflags", "-s -w", "-o", into+"/", p)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("build %s: %w\n%s", p, err, out)
		}
	}
	return nil
}

// limit bounds every single command: whatever hangs fails its test with what
// it said, and not the whole run with nothing.
const limit = 3 * time.Minute

// result is what a command did.
type result struct {
	out, err string
	code     int
	took     time.Duration
}

// do runs a command to its end.
func do(tb testing.TB, env []string, stdin []byte, name string, args ...string) result {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit) // clean-ups run commands too
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(os.Environ(), env...)
	cmd.WaitDelay = 5 * time.Second // a child that keeps the pipes must not hang the test
	if stdin != nil {
		cmd.Stdin = bytes.NewReader(stdin)
	}
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	began := time.Now()
	err := cmd.Run()
	r := result{out.String(), errs.String(), 0, time.Since(began)}
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		r.code = exit.ExitCode()
	} else if err != nil {
		tb.Fatalf("%s %s: %v", name, strings.Join(args, " "), err)
	}
	if ctx.Err() != nil {
		tb.Fatalf("%s %s: not done in %s\n%s%s", name, strings.Join(args, " "), limit, r.out, r.err)
	}
	return r
}

// gateway is one running "helix up".
type gateway struct {
	t     testing.TB
	state string
	net   netip.Prefix
	flags []string
	wrap  []string // what "helix up" runs under, such as a network namespace
	cmd   *exec.Cmd
	log   *os.File
	info  api.Info
}

var ranges atomic.Uint32

// nextRange gives each gateway 256 addresses. Test runs on one machine get
// different ones, most likely.
func nextRange() netip.Prefix {
	n := ranges.Add(1) - 1
	second := byte(130 + os.Getpid()%100)
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{127, second, byte(n), 0}), 24)
}

// newGateway makes a gateway that is not started yet.
func newGateway(tb testing.TB, flags ...string) *gateway {
	tb.Helper()
	state, err := os.MkdirTemp("", "hx")
	if err != nil {
		tb.Fatal(err)
	}
	g := &gateway{t: tb, state: state, net: nextRange(), flags: flags}
	if g.log, err = os.Create(filepath.Join(state, "up.log")); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(g.cleanup)
	return g
}

// startGateway makes and starts one.
func startGateway(tb testing.TB, flags ...string) *gateway {
	tb.Helper()
	g := newGateway(tb, flags...)
	g.start()
	return g
}

// start runs "helix up" and returns when it says that it is ready.
func (g *gateway) start() {
	g.t.Helper()
	notify, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(g.state, "notify"), Net: "unixgram"})
	if err != nil {
		g.t.Fatal(err)
	}
	defer os.Remove(filepath.Join(g.state, "notify"))
	defer notify.Close()
	args := append(append([]string{}, g.wrap...), filepath.Join(bin, "helix"), "up", "--state", g.state, "--range", g.net.String(), "--grace", "2s")
	args = append(args, g.flags...)
	g.cmd = exec.Command(args[0], args[1:]...)
	g.cmd.Env = append(os.Environ(), "NOTIFY_SOCKET="+filepath.Join(g.state, "notify"))
	g.cmd.Stdout, g.cmd.Stderr = g.log, g.log
	if err := g.cmd.Start(); err != nil {
		g.t.Fatal(err)
	}
	if err := notify.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		g.t.Fatal(err)
	}
	buf := make([]byte, 256)
	for {
		n, err := notify.Read(buf)
		if err != nil {
			g.t.Fatalf("gateway did not get ready: %v\n%s", err, g.said())
		}
		if strings.Contains(string(buf[:n]), "READY=1") {
			break
		}
	}
	g.json(&g.info, "status")
}

// said is the gateway's own log.
func (g *gateway) said() string {
	text, _ := os.ReadFile(g.log.Name()) // for a failure message only
	return string(text)
}

// stop ends the gateway in good order and checks that it does.
func (g *gateway) stop() {
	g.t.Helper()
	if g.cmd == nil {
		return
	}
	if err := g.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		g.t.Fatal(err)
	}
	late := time.AfterFunc(30*time.Second, func() { _ = g.cmd.Process.Signal(syscall.SIGQUIT) }) // its stacks go to the log
	defer late.Stop()
	if err := g.cmd.Wait(); err != nil {
		g.t.Errorf("gateway ended with %v\n%s", err, g.said())
	}
	g.cmd = nil
}

// crash kills the gateway where it stands.
func (g *gateway) crash() {
	g.t.Helper()
	if err := g.cmd.Process.Kill(); err != nil {
		g.t.Fatal(err)
	}
	_ = g.cmd.Wait() // killed
	g.cmd = nil
}

// cleanup removes every workspace, ends the gateway and checks that nothing is left.
func (g *gateway) cleanup() {
	if g.t.Failed() {
		g.t.Logf("gateway log:\n%s", g.said())
	}
	if g.cmd == nil {
		g.start()
	}
	for _, w := range g.list() {
		if r := g.helix("rm", w.Name); r.code != 0 {
			g.t.Errorf("rm %s: %s", w.Name, r.err)
		}
	}
	g.stop()
	_ = g.log.Close()
	if left := processesOf(g.state); len(left) > 0 {
		g.t.Errorf("left behind: %v", left)
	}
	if err := os.RemoveAll(g.state); err != nil {
		g.t.Error(err)
	}
}

// helix runs the command line against the gateway.
func (g *gateway) helix(args ...string) result {
	g.t.Helper()
	return do(g.t, []string{"HELIX_STATE=" + g.state}, nil, filepath.Join(bin, "helix"), args...)
}

// must is helix for a command that has to succeed; it returns its output.
func (g *gateway) must(args ...string) string {
	g.t.Helper()
	r := g.helix(args...)
	if r.code != 0 {
		g.t.Fatalf("helix %s: exit %d\n%s%s", strings.Join(args, " "), r.code, r.out, r.err)
	}
	return r.out
}

// json runs a reading command with --json.
func (g *gateway) json(into any, args ...string) {
	g.t.Helper()
	if err := json.Unmarshal([]byte(g.must(append(args, "--json")...)), into); err != nil {
		g.t.Fatalf("helix %s: %v", strings.Join(args, " "), err)
	}
}

func (g *gateway) list() []api.Workspace {
	g.t.Helper()
	var list []api.Workspace
	g.json(&list, "ls")
	return list
}

func (g *gateway) workspace(name string) api.Workspace {
	g.t.Helper()
	var w api.Workspace
	g.json(&w, "status", name)
	return w
}

func (g *gateway) target(name string) api.Target {
	g.t.Helper()
	return g.workspace(name).Targets[0]
}

// dir creates a directory workspace and returns its folder.
func (g *gateway) dir(name string) string {
	g.t.Helper()
	folder := g.t.TempDir()
	g.must("create", name, "--dir", folder)
	return folder
}

// peer puts the peer program into the workspace and starts it there. It
// returns when the peer listens; the ports are those of its arguments.
func (g *gateway) peer(name string, modes ...string) {
	g.t.Helper()
	program, err := os.ReadFile(filepath.Join(bin, "peer"))
	if err != nil {
		g.t.Fatal(err)
	}
	helix := []string{"HELIX_STATE=" + g.state}
	r := do(g.t, helix, program, filepath.Join(bin, "helix"), "exec", name, "--", "sh", "-c", "cat >peer && chmod +x peer")
	if r.code != 0 {
		g.t.Fatalf("copy peer: %s", r.err)
	}
	// The log is where the peer says that it listens, and what it counted.
	g.must("exec", name, "--", "sh", "-c", "./peer "+strings.Join(modes, " ")+" >peer.log 2>&1 </dev/null & "+
		"until grep -q listening peer.log; do kill -0 $! || { cat peer.log >&2; exit 1; }; sleep 0.1; done")
}

// seed is the image that all gateways of this run share. It is built once, by
// the command a user would type.
var seed struct {
	dir  string
	once sync.Once
	err  error
}

// useImage gives the gateway the tiny image. Blobs are never written, so hard
// links will do. It is called before start.
func (g *gateway) useImage() {
	g.t.Helper()
	seed.once.Do(func() {
		b := newGateway(g.t)
		b.start()
		b.must("image", "build", "tiny")
		b.stop()
		if out, err := exec.Command("cp", "-al", filepath.Join(b.state, "images"), seed.dir).CombinedOutput(); err != nil {
			seed.err = fmt.Errorf("%w: %s", err, out)
		}
	})
	if seed.err != nil {
		g.t.Fatal(seed.err)
	}
	if out, err := exec.Command("cp", "-al", seed.dir, filepath.Join(g.state, "images")).CombinedOutput(); err != nil {
		g.t.Fatalf("%v: %s", err, out)
	}
}

// processesOf lists the processes whose command line names the folder.
func processesOf(folder string) []string {
	var found []string
	entries, _ := os.ReadDir("/proc") // none: nothing found, and the test that relies on it fails
	for _, e := range entries {
		text, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		if err == nil && bytes.Contains(text, []byte(folder)) {
			found = append(found, e.Name()+" "+strings.ReplaceAll(string(text), "\x00", " "))
		}
	}
	return found
}

// files lists what is below a folder, sockets included; nothing when it is not there.
func files(t *testing.T, folder string) []string {
	t.Helper()
	var list []string
	err := filepath.WalkDir(folder, func(path string, _ fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err == nil {
			rel, _ := filepath.Rel(folder, path) // path is below folder
			list = append(list, rel)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// eventually waits until is says true. What it waits for has no event that this
// side of the product could watch.
func eventually(tb testing.TB, within time.Duration, what string, is func() bool) {
	tb.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(within)
	for !is() {
		select {
		case <-tick.C:
		case <-deadline:
			tb.Fatalf("%s: not within %s", what, within)
		}
	}
}

// hostArgs are the ssh options that a user of the generated configuration has.
func (g *gateway) sshArgs() []string {
	g.t.Helper()
	path := filepath.Join(g.state, "e2e_ssh_config")
	if err := os.WriteFile(path, []byte(g.must("ssh-config")), 0o600); err != nil {
		g.t.Fatal(err)
	}
	return []string{"-F", path}
}

// ssh runs OpenSSH's client with the generated configuration.
func (g *gateway) ssh(stdin []byte, args ...string) result {
	g.t.Helper()
	return do(g.t, nil, stdin, "ssh", append(g.sshArgs(), args...)...)
}
