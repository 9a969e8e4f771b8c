//go:build linux

package e2e

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// A comparison is two or more things measured in turns, so that whatever the
// machine does beside them hits all of them alike. Only medians leave it.
type comparison struct {
	b       *testing.B
	samples map[string][]float64 // in seconds, unless the name says otherwise
}

func newComparison(b *testing.B) *comparison {
	b.Helper()
	return &comparison{b, make(map[string][]float64)}
}

func (c *comparison) add(name string, value float64) {
	c.samples[name] = append(c.samples[name], value)
}

func (c *comparison) median(name string) float64 {
	c.b.Helper()
	values := slices.Sorted(slices.Values(c.samples[name]))
	if len(values) == 0 {
		c.b.Fatalf("nothing was measured for %s", name)
	}
	return (values[(len(values)-1)/2] + values[len(values)/2]) / 2
}

// report shows the median of a name, times scale, under the unit.
func (c *comparison) report(name string, scale float64, unit string) {
	c.b.Helper()
	c.b.ReportMetric(c.median(name)*scale, unit)
}

// ratio shows the median of one by the median of another.
func (c *comparison) ratio(one, other, unit string) {
	c.b.Helper()
	c.b.ReportMetric(c.median(one)/c.median(other), unit)
}

// done hides the time of a whole round, which says nothing.
func (c *comparison) done() { c.b.ReportMetric(0, "ns/op") }

// freePort is a TCP address on 127.0.0.1 that nobody uses now.
func freePort(b *testing.B) string {
	b.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// background runs a command until the benchmark ends.
func background(b *testing.B, cmd *exec.Cmd) {
	b.Helper()
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()         // killed
	})
}

// relay starts a plain relay in front of upstream, as a process of its own, and
// returns its address.
func relay(b *testing.B, upstream string) string {
	b.Helper()
	addr := freePort(b)
	cmd := exec.Command(filepath.Join(bin, "peer"), "relay="+addr+","+upstream)
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	background(b, cmd)
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		b.Fatalf("relay: %q, %v", line, err)
	}
	return addr
}

// pull downloads the blob and returns the bytes a second.
func pull(b *testing.B, addr string) float64 {
	b.Helper()
	r := do(b, nil, nil, filepath.Join(bin, "peer"), "pull", addr)
	if r.code != 0 {
		b.Fatalf("pull from %s: %s", addr, r.err)
	}
	return rate(b, r.out)
}

func rate(b *testing.B, out string) float64 {
	b.Helper()
	var size, ns float64
	if _, err := fmt.Sscan(out, &size, &ns); err != nil || size < 64<<20 {
		b.Fatalf("pull said %q: %v", out, err)
	}
	return size / ns * 1e9
}

// BenchmarkDownload is one stream of 64 MiB from client over gateway and agent to a
// service, against the same service of a directory behind a plain relay.
// "inside" is the guest's service pulled by a client in the guest.
func BenchmarkDownload(b *testing.B) {
	g := startVMGateway(b)
	g.dir("site")
	g.must("create", "demo", "--image", "tiny")
	g.startPeer("site")
	g.startPeer("demo")
	port := strconv.Itoa(blobPort)
	service := strings.TrimSpace(g.must("exec", "site", "--", "sh", "-c", `echo "$HELIX_ADDR"`)) + ":" + port
	ways := map[string]string{
		"relay": relay(b, service),
		"dir":   g.workspace("site").Address + ":" + port,
		"vm":    g.workspace("demo").Address + ":" + port,
	}
	c := newComparison(b)
	for b.Loop() {
		for way, addr := range ways {
			c.add(way, pull(b, addr))
		}
		c.add("inside", rate(b, g.must("exec", "demo", "--", "./peer", "pull", "127.0.0.1:"+port)))
	}
	for _, way := range []string{"relay", "dir", "vm", "inside"} {
		c.report(way, 1e-6, way+"-MB/s")
	}
	c.ratio("dir", "relay", "ratio-dir-vs-relay")
	c.ratio("vm", "relay", "ratio-vm-vs-relay")
	c.ratio("vm", "inside", "ratio-vm-vs-inside")
	c.done()
}

// sshBase are the choices that both servers must make alike: without them each
// would pick its own key exchange, and the ratio would compare those.
var sshBase = []string{
	"-o", "KexAlgorithms=curve25519-sha256", "-o", "Ciphers=aes128-gcm@openssh.com", "-o", "HostKeyAlgorithms=ssh-ed25519",
	"-o", "BatchMode=yes", "-o", "ControlPath=none",
}

// noStartFiles keeps bash from reading the user's ~/.bashrc, as it does for a
// command that comes over the network: that may take longer than all the rest.
var noStartFiles = []string{"-o", "SetEnv=SHLVL=2"}

// sshServer starts OpenSSH's server for the current user and returns the
// client's arguments for it.
func sshServer(b *testing.B, key string) []string {
	b.Helper()
	program := os.Getenv("HELIX_SSHD")
	if program == "" {
		program = "/usr/sbin/sshd" // it insists on an absolute path
	}
	if os.Geteuid() == 0 { // the server gives up its privileges there
		if err := os.MkdirAll("/run/sshd", 0o755); err != nil {
			b.Fatal(err)
		}
	}
	me, err := user.Current()
	if err != nil {
		b.Fatal(err)
	}
	folder := b.TempDir()
	host, keys, known := filepath.Join(folder, "host"), filepath.Join(folder, "keys"), filepath.Join(folder, "known")
	if r := do(b, nil, nil, "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", host); r.code != 0 {
		b.Fatal(r.err)
	}
	allowed := do(b, nil, nil, "ssh-keygen", "-y", "-f", key)
	if allowed.code != 0 {
		b.Fatal(allowed.err)
	}
	public, err := os.ReadFile(host + ".pub")
	if err != nil {
		b.Fatal(err)
	}
	addr := freePort(b)
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		b.Fatal(err)
	}
	for file, text := range map[string]string{keys: allowed.out, known: "bench " + string(public)} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			b.Fatal(err)
		}
	}
	cmd := exec.Command(program, "-D", "-e", "-f", "/dev/null", "-p", port, "-h", host, "-o", "ListenAddress=127.0.0.1",
		"-o", "AuthorizedKeysFile="+keys, "-o", "StrictModes=no", "-o", "UsePAM=no", "-o", "PidFile=none", "-o", "AcceptEnv=SHLVL", "-o", "LogLevel=INFO")
	said, err := cmd.StderrPipe()
	if err != nil {
		b.Fatal(err)
	}
	background(b, cmd)
	lines := bufio.NewReader(said)
	for {
		line, err := lines.ReadString('\n')
		if err != nil {
			b.Fatalf("sshd ended: %s %v", line, err)
		}
		if strings.Contains(line, "listening on") {
			break
		}
	}
	go func() { _, _ = io.Copy(io.Discard, lines) }() // ends with the server
	return []string{
		"-F", "none", "-o", "UserKnownHostsFile=" + known, "-o", "GlobalKnownHostsFile=none", "-o", "StrictHostKeyChecking=yes",
		"-o", "HostKeyAlias=bench", "-o", "IdentitiesOnly=yes", "-i", key, "-l", me.Username, "-p", port, "127.0.0.1",
	}
}

// BenchmarkConnect is a whole "ssh HOST true" against OpenSSH's server on this
// machine with the same client, key and algorithms. "helix exec NAME -- true" in
// a directory cannot turn off the shell's start files, so its other side reads
// them too (sshd-rc); the guest of a machine has none.
func BenchmarkConnect(b *testing.B) {
	g := startVMGateway(b)
	g.dir("site")
	g.must("create", "demo", "--image", "tiny")
	server := sshServer(b, filepath.Join(g.state, "ssh", "cli_key"))
	ssh := func(parts ...[]string) []string {
		return slices.Concat(append([][]string{{"ssh"}, sshBase}, parts...)...)
	}
	type way struct {
		name, against string
		command       []string
	}
	ways := []way{{"sshd", "", ssh(noStartFiles, server)}, {"sshd-rc", "", ssh(server)}}
	for _, ws := range []struct{ kind, name, shell string }{{"dir", "site", "sshd-rc"}, {"vm", "demo", "sshd"}} {
		of := g.ways(ws.name)
		ways = append(ways,
			way{ws.kind + "-address", "sshd", ssh(noStartFiles, of["address"])},
			way{ws.kind + "-proxy", "sshd", ssh(noStartFiles, of["ProxyCommand"])},
			way{ws.kind + "-exec", ws.shell, []string{filepath.Join(bin, "helix"), "exec", ws.name, "--"}},
		)
	}
	env := []string{"HELIX_STATE=" + g.state}
	c := newComparison(b)
	for b.Loop() {
		for range 5 { // a single one is too short to count
			for _, way := range ways {
				command := append(slices.Clone(way.command), "true")
				r := do(b, env, nil, command[0], command[1:]...)
				if r.code != 0 {
					b.Fatalf("%s: exit %d\n%s", strings.Join(command, " "), r.code, r.err)
				}
				c.add(way.name, r.took.Seconds())
			}
		}
	}
	for _, way := range ways {
		c.report(way.name, 1000, way.name+"-ms")
		if way.against != "" {
			c.ratio(way.name, way.against, "ratio-"+way.name+"-vs-"+way.against)
		}
	}
	c.done()
}

// memory is what a process holds, in MB.
type memory struct{ rss, pss, anon float64 }

// memoryOf reads /proc. RSS counts every page that the process maps, PSS counts
// those that several share by their share, and anon is what is its alone to give back.
func memoryOf(b *testing.B, pid int) memory {
	b.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		b.Fatal(err)
	}
	kb := make(map[string]float64)
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) == 3 && f[2] == "kB" {
			kb[f[0]], _ = strconv.ParseFloat(f[1], 64) // the kernel's own number
		}
	}
	if kb["Rss:"] == 0 || kb["Pss:"] == 0 {
		b.Fatalf("memory of process %d: %s", pid, text)
	}
	return memory{kb["Rss:"] / 1024, kb["Pss:"] / 1024, kb["Anonymous:"] / 1024}
}

// settled waits until the memory of a process has not changed by a hundredth
// for a second: after a start it still gives pages back.
func settled(b *testing.B, pid int) memory {
	b.Helper()
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	last := memoryOf(b, pid)
	for range 15 {
		<-tick.C
		now := memoryOf(b, pid)
		if diff := now.pss - last.pss; diff < last.pss/100 && diff > -last.pss/100 {
			return now
		}
		last = now
	}
	return last
}

// BenchmarkMemory is what the processes of a gateway hold, at first with no
// workspace, and then with one of each kind.
func BenchmarkMemory(b *testing.B) {
	g := startVMGateway(b)
	folder := b.TempDir()
	c := newComparison(b)
	add := func(name string, m memory) {
		c.add(name+"-rss-MB", m.rss)
		c.add(name+"-pss-MB", m.pss)
		c.add(name+"-anon-MB", m.anon)
	}
	for b.Loop() {
		g.stop()
		g.start()
		add("gateway-idle", settled(b, g.cmd.Process.Pid))
		g.must("create", "site", "--dir", folder)
		g.must("create", "demo", "--image", "tiny")
		add("gateway", settled(b, g.cmd.Process.Pid))
		add("shim", settled(b, g.vmProcess("demo", "vmshim")))
		add("qemu", settled(b, g.vmProcess("demo", "qemu-system")))
		add("dir-agent", settled(b, childOf(b, g.cmd.Process.Pid, "helix-agent")))
		g.must("rm", "site")
		g.must("rm", "demo")
	}
	for name := range c.samples {
		c.report(name, 1, name)
	}
	c.ratio("shim-pss-MB", "qemu-pss-MB", "ratio-shim-vs-qemu-pss")
	c.done()
}

// childOf finds the child of a process by the name of its program.
func childOf(b *testing.B, parent int, name string) int {
	b.Helper()
	for _, line := range processesOf(name) {
		var pid int
		if _, err := fmt.Sscan(line, &pid); err != nil {
			b.Fatal(err)
		}
		stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid)) // it may have ended
		if strings.Contains(string(stat), fmt.Sprintf("\nPPid:\t%d\n", parent)) {
			return pid
		}
	}
	b.Fatalf("process %d has no child %s", parent, name)
	return 0
}
