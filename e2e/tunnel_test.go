//go:build linux

package e2e

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"helix.local/helix/gateway/api"
)

// The ports of the peer.
const (
	sumPort = 7001 + iota
	firstPort
	resetPort
	blobPort
	holdPort
)

func (g *gateway) startPeer(name string) {
	g.t.Helper()
	var modes []string
	for port, mode := range map[int]string{sumPort: "sum", firstPort: "first", resetPort: "reset", blobPort: "blob", holdPort: "hold"} {
		modes = append(modes, fmt.Sprintf("%s=0.0.0.0:%d", mode, port))
	}
	if g.target(name).Kind == "dir" { // two of them on one machine: each has its own address
		for i := range modes {
			modes[i] = strings.Replace(modes[i], "0.0.0.0", "$HELIX_ADDR", 1)
		}
	}
	g.peer(name, modes...)
	eventually(g.t, 10*time.Second, "ports of "+name, func() bool { return len(g.workspace(name).Ports) >= len(modes) })
}

// halfConn is what both a TCP and a unix connection can do.
type halfConn interface {
	net.Conn
	CloseWrite() error
}

// tcpWays are the ways in that carry any TCP port.
func (g *gateway) tcpWays(name string) map[string]func(t *testing.T, port int) halfConn {
	addr := g.workspace(name).Address
	return map[string]func(t *testing.T, port int) halfConn{
		"address": func(t *testing.T, port int) halfConn {
			t.Helper()
			var d net.Dialer
			c, err := d.DialContext(t.Context(), "tcp", fmt.Sprintf("%s:%d", addr, port))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = c.Close() }) // often closed already
			return c.(*net.TCPConn)
		},
		"proxy": func(t *testing.T, port int) halfConn {
			t.Helper()
			c, err := api.DialProxy(t.Context(), filepath.Join(g.state, "proxy.sock"), api.ProxyRequest{Host: name, Port: uint16(port)})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = c.Close() })
			return c
		},
	}
}

// testHalfClose is the half-close matrix for one target.
func testHalfClose(t *testing.T, g *gateway, name string) {
	g.startPeer(name)
	for way, dial := range g.tcpWays(name) {
		for _, size := range []int{0, 1, 100_000, 5 << 20} {
			t.Run(fmt.Sprintf("%s client first %d", way, size), func(t *testing.T) {
				data := bytes.Repeat([]byte("helix"), size/5+1)[:size]
				c := dial(t, sumPort)
				deadline(t, c)
				if _, err := c.Write(data); err != nil {
					t.Fatal(err)
				}
				if err := c.CloseWrite(); err != nil {
					t.Fatal(err)
				}
				got, err := io.ReadAll(c)
				if want := fmt.Sprintf("%x\n", sha256.Sum256(data)); err != nil || string(got) != want {
					t.Errorf("got %q, %v, want %q", got, err, want)
				}
			})
		}
		t.Run(way+" server first", func(t *testing.T) {
			c := dial(t, firstPort)
			deadline(t, c)
			if got, err := io.ReadAll(c); err != nil || string(got) != "done first\n" {
				t.Fatalf("got %q, %v", got, err)
			}
			if _, err := c.Write(make([]byte, 1<<20)); err != nil {
				t.Errorf("the other half is closed too: %v", err)
			}
			if err := c.CloseWrite(); err != nil {
				t.Error(err)
			}
			eventually(t, 20*time.Second, "all of it at the server", func() bool {
				return strings.Contains(g.must("exec", name, "--", "cat", "peer.log"), "first got 1048576")
			})
			g.must("exec", name, "--", "sh", "-c", ": >peer.log")
		})
		t.Run(way+" reset", func(t *testing.T) {
			c := dial(t, resetPort)
			deadline(t, c)
			if _, err := c.Write([]byte("x")); err != nil {
				t.Fatal(err)
			}
			_, err := io.ReadAll(c)
			if way == "address" && !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("got %v, want a reset", err) // a unix socket has no way to say it
			}
		})
		t.Run(way+" empty", func(t *testing.T) {
			c := dial(t, sumPort)
			deadline(t, c)
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	testStdioHalfClose(t, g, name)
}

func deadline(t *testing.T, c net.Conn) {
	t.Helper()
	if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
}

// testStdioHalfClose does the same over commands whose standard input ends.
func testStdioHalfClose(t *testing.T, g *gateway, name string) {
	data := bytes.Repeat([]byte("helix"), 200_000)
	want := fmt.Sprintf("%x\n", sha256.Sum256(data))
	host := g.workspace(name).Hostname
	commands := map[string][]string{
		"helix proxy": {filepath.Join(bin, "helix"), "--state", g.state, "proxy", host, fmt.Sprint(sumPort)},
		"ssh -W":      append(append([]string{"ssh"}, g.sshArgs()...), "-W", fmt.Sprintf("%s:%d", name, sumPort), "gw."+g.info.Zone),
	}
	for way, c := range commands {
		t.Run(way, func(t *testing.T) {
			if r := do(t, nil, data, c[0], c[1:]...); r.out != want {
				t.Errorf("code %d, got %q, want %q; %s", r.code, r.out, want, r.err)
			}
		})
	}
}

func TestDirectoryHalfClose(t *testing.T) {
	g := startGateway(t)
	g.dir("demo")
	testHalfClose(t, g, "demo")
	t.Run("nothing listens", func(t *testing.T) { testRefused(t, g, "demo") })
	t.Run("death in the middle of a download", func(t *testing.T) { testCutDownload(t, g, "demo") })
	t.Run("many short connections", func(t *testing.T) { testMany(t, g, "demo", 10_000) })
}

// testRefused asks for a port where nothing listens, by every way that can say so.
func testRefused(t *testing.T, g *gateway, name string) {
	if r := g.curl(fmt.Sprintf("http://%s:7999/", g.workspace(name).Address)); r.code != 7 {
		t.Errorf("address: curl exit %d, want 7: %s", r.code, r.err)
	}
	r := g.ssh([]byte("x"), "-W", name+":7999", "gw."+g.info.Zone)
	if r.out != "" || !strings.Contains(r.err, "nothing listens on port 7999") {
		t.Errorf("ssh -W: code %d, %q %q", r.code, r.out, r.err)
	}
	if r := g.helix("proxy", name, "7999"); r.code == 0 || !strings.Contains(r.err, "nothing listens on port 7999") {
		t.Errorf("helix proxy: code %d, %q", r.code, r.err)
	}
}

// testCutDownload kills the session under a download: the client must see
// that something is missing.
func testCutDownload(t *testing.T, g *gateway, name string) {
	addr := g.workspace(name).Address
	done := make(chan result, 1)
	out := filepath.Join(t.TempDir(), "blob")
	go func() {
		// So slow that it cannot be through before the agent dies.
		done <- do(t, nil, nil, "curl", "-sS", "--limit-rate", "2M", "--max-time", "60", "-o", out, fmt.Sprintf("http://%s:%d/", addr, blobPort))
	}()
	eventually(t, 30*time.Second, "first bytes", func() bool {
		info, err := os.Stat(out)
		return err == nil && info.Size() > 0
	})
	g.killAgent(name)
	if r := <-done; r.code != 18 && r.code != 56 {
		t.Errorf("curl exit %d, want 18 (partial) or 56 (reset): %s", r.code, r.err)
	}
	eventually(t, time.Minute, "the end to be noticed", func() bool { return g.target(name).State == "failed" })
	if w := g.target(name); w.Reason == "" || w.Hint == "" {
		t.Errorf("failed without a reason or hint: %+v", w)
	}
	g.must("start", name)
	g.startPeer(name)
}

// killAgent kills the process that stands behind a workspace: the agent of a
// directory, QEMU of a virtual machine.
func (g *gateway) killAgent(name string) {
	g.t.Helper()
	if g.target(name).Kind == "vm" {
		g.kill(g.vmProcess(name, "qemu-system"))
		return
	}
	var pid int
	if _, err := fmt.Sscan(g.must("exec", name, "--", "sh", "-c", agentPID), &pid); err != nil {
		g.t.Fatal(err)
	}
	g.kill(pid)
}

// agentPID prints the number of the agent that a shell in the workspace
// descends from: the nearest ancestor that is one.
const agentPID = `p=$$; until [ "$(basename "$(readlink /proc/$p/exe)")" = helix-agent ]; do p=$(awk '/^PPid:/{print $2}' /proc/$p/status); done; echo $p`

// kill ends one process that this test found for certain to be its own.
func (g *gateway) kill(pid int) {
	g.t.Helper()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		g.t.Fatalf("kill %d: %v", pid, err)
	}
}

// testMany makes n short connections of every kind and compares what the
// gateway holds before and after.
func testMany(t *testing.T, g *gateway, name string, n int) {
	addr := netip.MustParseAddr(g.workspace(name).Address)
	before := descriptors(t, g.cmd.Process.Pid)
	memory := residentKB(t, g.cmd.Process.Pid)
	var work sync.WaitGroup
	next := make(chan int)
	for range 16 {
		work.Go(func() {
			for i := range next {
				short(t, addr, i)
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	work.Wait()
	eventually(t, time.Minute, "descriptors at the base line", func() bool { return descriptors(t, g.cmd.Process.Pid) <= before+2 })
	if grown := residentKB(t, g.cmd.Process.Pid) - memory; grown > 100<<10 {
		t.Errorf("resident memory grew by %d KiB", grown)
	}
}

func short(t *testing.T, addr netip.Addr, i int) {
	port := []int{sumPort, firstPort, resetPort}[i%3]
	var d net.Dialer
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	plain, err := d.DialContext(ctx, "tcp", fmt.Sprintf("%s:%d", addr, port))
	if err != nil {
		t.Error(err)
		return
	}
	c := plain.(*net.TCPConn)
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Error(err)
	}
	_, _ = c.Write([]byte("x")) // the peer may have reset first
	switch i % 4 {
	case 0:
		_ = c.CloseWrite() // reset by the peer at times
		_, err = io.Copy(io.Discard, c)
	case 1:
		_ = c.SetLinger(0) // reset by us
	case 2:
		var one [1]byte
		_, err = c.Read(one[:0])
	case 3:
		_ = c.CloseWrite()
	}
	if err != nil && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("connection %d to port %d: %v", i, port, err)
	}
}

func descriptors(t *testing.T, pid int) int {
	t.Helper()
	list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

func residentKB(t *testing.T, pid int) int {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	var kb int
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			if _, err := fmt.Sscan(rest, &kb); err != nil {
				t.Fatal(err)
			}
		}
	}
	return kb
}
