package vmctl

import (
	"context"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// serveEcho answers each connection with what it sent until its end.
func serveEcho(t *testing.T, network, addr string) string {
	t.Helper()
	ln, err := net.Listen(network, addr)
	if err != nil {
		t.Fatal(err)
	}
	var conns sync.WaitGroup
	conns.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			conns.Go(func() {
				defer c.Close()
				_, _ = io.Copy(c, c) // the guest sees what is missing
			})
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		conns.Wait()
	})
	return ln.Addr().String()
}

// A real guest reaches what the policy allows, with the ends of connections
// intact, and nothing of the host.
func TestGuestNetwork(t *testing.T) {
	m, h := testMachine(t)
	server := serveEcho(t, "tcp", "127.0.0.1:0")
	m.LinkSocket = filepath.Join(shortDir(t), "links.sock")
	serveEcho(t, "unix", m.LinkSocket)
	t.Setenv("VMCTL_TEST_DIVERT", "198.51.100.7:80="+server)
	m.CPUs = 2
	vm := startMachine(t, m, h)
	g, _ := meet(t, vm)
	if a := g.ask(guestRequest{Do: "net"}); !a.OK || a.Text != "10.188.0.2/24 10.188.0.1 10.188.0.1 65520" {
		t.Fatalf("dhcp gave %+v", a)
	}
	body := strings.Repeat("0123456789", 2000)
	for _, addr := range []string{"198.51.100.7:80", "10.188.0.1:4580"} {
		if a := g.ask(guestRequest{Do: "talk", Network: "tcp", Addr: addr, Send: body, Half: true}); !a.OK || a.Text != body {
			t.Errorf("%s: %d bytes came back, %s", addr, len(a.Text), a.Error)
		}
	}
	_, port, err := net.SplitHostPort(server)
	if err != nil {
		t.Fatal(err)
	}
	refused := []string{"169.254.169.254:80", "192.168.0.1:80", "10.0.0.1:80", "10.188.0.1:" + port}
	own, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range own { // the host by each of its own addresses
		if ip, ok := a.(*net.IPNet); ok && ip.IP.To4() != nil && !ip.IP.IsLoopback() {
			refused = append(refused, net.JoinHostPort(ip.IP.String(), port))
		}
	}
	for _, addr := range refused {
		if a := g.ask(guestRequest{Do: "talk", Network: "tcp", Addr: addr, Send: "x"}); a.OK || !strings.Contains(a.Error, "refused") {
			t.Errorf("%s: %+v", addr, a)
		}
	}
	nw, err := vm.Network(t.Context())
	if err != nil || !nw.Matches || nw.Enforced.Refused < int64(len(refused)-1) || nw.Backend != "stream" {
		t.Errorf("network is %+v, %v", nw, err)
	}
	if a := g.ask(guestRequest{Do: "disk"}); a.Text != "16777216" {
		t.Errorf("the disk has %+v sectors", a)
	}
}

func TestConsoleIsCapped(t *testing.T) {
	path := filepath.Join(t.TempDir(), "console.log")
	limits := LogLimits{Bytes: 1000, Keep: 2}
	c, err := openConsole(path, limits)
	if err != nil {
		t.Fatal(err)
	}
	for range 200 {
		if _, err := io.WriteString(c, strings.Repeat("x", 49)+"\n"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := io.WriteString(c, "\x1b[31mlast\x00 line\r\n"); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(c, "after the end\n"); err != nil {
		t.Fatal(err)
	}
	found, err := filepath.Glob(path + "*")
	if err != nil || len(found) != 3 {
		t.Errorf("files are %v, %v", found, err)
	}
	for _, f := range found {
		if info, err := os.Stat(f); err != nil || info.Size() > 1000 {
			t.Errorf("%s is %v, %v", f, info, err)
		}
	}
	lines := c.Lines()
	if len(lines) != tailLines || lines[len(lines)-2] != "[31mlast line" {
		t.Errorf("last lines are %q", lines)
	}
	var all strings.Builder
	if err := ReadConsole(&all, Plan{Files: Files{Console: path}, Console: limits}); err != nil || !strings.HasSuffix(all.String(), "line\r\n") {
		t.Errorf("log is %d bytes, %v", all.Len(), err)
	}
	second, err := openConsole(path, limits) // a new start keeps the old log
	if err != nil {
		t.Fatal(err)
	}
	if err := second.Close(); err != nil {
		t.Fatal(err)
	}
	if old, err := os.ReadFile(path + ".1"); err != nil || !strings.Contains(string(old), "last") {
		t.Errorf("old log is %q, %v", old, err)
	}
	capped := &cappedFile{w: &all, left: 10}
	for range 5 {
		if _, err := io.WriteString(capped, "12345678"); err != nil {
			t.Fatal(err)
		}
	}
	if got := all.String(); strings.Count(got, "12345678") != 2 || !strings.Contains(got, "log full") {
		t.Errorf("capped log ends with %q", got[len(got)-80:])
	}
}

// BenchmarkStart measures from Start to the guest's hello on the control port.
func BenchmarkStart(b *testing.B) {
	m, h := testMachine(b)
	for _, board := range []string{"microvm", "q35"} {
		b.Run(board, func(b *testing.B) {
			h := h
			if board == "q35" {
				h.TSCKHz = 0
			}
			for b.Loop() {
				vm := startMachine(b, m, h)
				running := time.Now()
				g, _ := meet(b, vm)
				b.ReportMetric(time.Since(running).Seconds(), "guest-s")
				_ = g.conn.Close() // or the next would wait for it
				if _, err := vm.Kill(context.Background()); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
