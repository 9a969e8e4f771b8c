//go:build linux

package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// The addresses of the policy test, all of them in the test's own namespace.
const (
	lanAddr      = "192.168.77.1"    // of the gateway's machine
	lanNeighbour = "192.168.77.9"    // of a neighbour
	metadata     = "169.254.169.254" // where clouds keep credentials
	public       = "8.8.4.4"         // stands for the internet; nothing leaves the namespace
	publicOwn    = "9.9.9.10"        // a public address of the gateway's machine
	servicePort  = 7777
)

// namespace makes a network namespace in which this machine has a loopback, a
// LAN, a metadata service, and an internet that is another namespace: every
// address that the guest tries is a server of this test.
func namespace(t *testing.T) (inside, outside string) {
	t.Helper()
	inside, outside = fmt.Sprintf("hx%d", os.Getpid()), fmt.Sprintf("hx%dout", os.Getpid())
	ip := func(args ...string) {
		t.Helper()
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %s: %v %s", strings.Join(args, " "), err, out)
		}
	}
	for _, ns := range []string{inside, outside} {
		ip("netns", "add", ns)
		t.Cleanup(func() { _ = exec.Command("ip", "netns", "del", ns).Run() }) // nothing else can be done
		ip("-n", ns, "link", "set", "lo", "up")
	}
	ip("-n", inside, "link", "add", "wan", "type", "veth", "peer", "name", "wan", "netns", outside)
	for _, a := range []string{lanAddr + "/24", publicOwn + "/32"} {
		ip("-n", inside, "addr", "add", a, "dev", "wan")
	}
	for _, a := range []string{lanNeighbour + "/24", metadata + "/32", public + "/32"} {
		ip("-n", outside, "addr", "add", a, "dev", "wan")
	}
	ip("-n", inside, "link", "set", "wan", "up")
	ip("-n", outside, "link", "set", "wan", "up")
	ip("-n", inside, "route", "add", "default", "via", lanNeighbour)
	ip("-n", outside, "route", "add", publicOwn+"/32", "via", lanAddr)
	return inside, outside
}

// serveIn runs the peer in a namespace on every address of it.
func serveIn(t *testing.T, ns string) {
	t.Helper()
	cmd := exec.Command("ip", "netns", "exec", ns, bin+"/peer", fmt.Sprintf("hold=:%d", servicePort))
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	if _, err := out.Read(make([]byte, 64)); err != nil { // "listening"
		t.Fatal(err)
	}
}

// TestGuestReachesPublicAddressesOnly tries, from inside a guest, everything
// that the policy "internet" refuses, and what it allows.
func TestGuestReachesPublicAddressesOnly(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Log("needs root for network namespaces; runs in the part of the tests that root runs")
		return
	}
	inside, outside := namespace(t)
	serveIn(t, inside)
	serveIn(t, outside)
	g := newGateway(t)
	g.useImage()
	g.wrap = []string{"ip", "netns", "exec", inside}
	g.start()
	g.must("create", "demo", "--image", "tiny")
	g.must("create", "other", "--image", "tiny")
	other := g.workspace("other").Address
	g.must("exec", "-u", "root", "other", "--", "sh", "-c", fmt.Sprintf("busybox httpd -p %d", servicePort))

	try := func(name, addr string) string {
		r := g.helix("exec", name, "--", "sh", "-c", fmt.Sprintf("busybox nc -w 5 %s %d </dev/null", addr, servicePort))
		return r.out
	}
	reachable := func(ns, addr string) bool {
		out, _ := exec.Command("ip", "netns", "exec", ns, "timeout", "5", "bash", "-c",
			fmt.Sprintf("exec 3<>/dev/tcp/%s/%d; head -c 5 <&3", addr, servicePort)).Output() // no answer is an answer
		return string(out) == "held\n"
	}
	blocked := map[string]string{
		"the host's LAN address": lanAddr, "a neighbour on the LAN": lanNeighbour, "metadata": metadata,
		"a public address of the host": publicOwn, "the host's loopback": "127.0.0.1", "the guest network's gateway": "10.188.0.1",
		"another workspace": other, "this gateway": g.info.Address, "this network": "0.0.0.0",
	}
	for what, addr := range blocked {
		if got := try("demo", addr); got != "" {
			t.Errorf("%s (%s) answered %q", what, addr, got)
		}
	}
	// The tries above mean nothing if the servers were not there.
	for _, addr := range []string{lanAddr, lanNeighbour, metadata, publicOwn, "127.0.0.1", public} {
		if !reachable(inside, addr) {
			t.Errorf("the host itself does not reach %s: the test proves nothing", addr)
		}
	}
	if got := try("demo", public); got != "held\n" {
		t.Errorf("a public address: %q", got)
	}
	eventually(t, 10*time.Second, "a refusal in the shim's log", func() bool {
		log, err := os.ReadFile(g.state + "/vm/demo/shim.log")
		return err == nil && strings.Contains(string(log), "guest refused")
	})
	t.Run("policy none", func(t *testing.T) {
		g.must("create", "shut", "--image", "tiny", "--policy", "none")
		if got := try("shut", public); got != "" {
			t.Errorf("a public address answered %q", got)
		}
		if got := g.must("exec", "shut", "--", "echo", "control"); got != "control\n" {
			t.Errorf("exec: %q", got)
		}
	})
}
