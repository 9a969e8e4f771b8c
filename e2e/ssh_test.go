//go:build linux

package e2e

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// ways are the three ways in that a user has for OpenSSH, each with strict
// host key checking.
func (g *gateway) ways(name string) map[string][]string {
	g.t.Helper()
	ws := g.workspace(name)
	known, key := filepath.Join(g.state, "ssh", "known_hosts"), filepath.Join(g.state, "ssh", "cli_key")
	base := []string{
		"-F", "none", "-o", "UserKnownHostsFile=" + known, "-o", "GlobalKnownHostsFile=none",
		"-o", "StrictHostKeyChecking=yes", "-o", "IdentitiesOnly=yes", "-i", key, "-l", "helix",
	}
	return map[string][]string{
		"address":      append(base, "-o", "HostKeyAlias="+ws.Hostname, "-p", fmt.Sprint(g.info.SSHPort), ws.Address),
		"jump host":    append(g.sshArgs(), "-J", "gw."+g.info.Zone, ws.Hostname),
		"ProxyCommand": append(g.sshArgs(), ws.Hostname),
	}
}

// testSSH is what must hold for every kind of target.
func testSSH(t *testing.T, g *gateway, name string) {
	for way, args := range g.ways(name) {
		t.Run(way, func(t *testing.T) {
			r := do(t, nil, nil, "ssh", append(args, "echo o; echo e >&2; exit 7")...)
			if r.out != "o\n" || strings.TrimSpace(r.err) != "e" || r.code != 7 {
				t.Fatalf("out %q, err %q, code %d", r.out, r.err, r.code)
			}
			for _, code := range []int{0, 1, 2, 126, 127, 255} {
				if r := do(t, nil, nil, "ssh", append(args, fmt.Sprintf("exit %d", code))...); r.code != code || r.out != "" || r.err != "" {
					t.Errorf("exit %d: code %d, out %q, err %q", code, r.code, r.out, r.err)
				}
			}
			// A helper of ssh that lingers would keep the pipe open.
			if r := do(t, nil, nil, "ssh", append(args, "true")...); r.code != 0 || r.out+r.err != "" {
				t.Errorf("true: code %d, out %q, err %q", r.code, r.out, r.err)
			}
			binary := make([]byte, 10<<20)
			_, _ = rand.Read(binary) // never fails
			want := fmt.Sprintf("%x", sha256.Sum256(binary))
			if r := do(t, nil, binary, "ssh", append(args, "cat")...); r.code != 0 || fmt.Sprintf("%x", sha256.Sum256([]byte(r.out))) != want {
				t.Errorf("10 MiB through cat: code %d, %d bytes came back, err %q", r.code, len(r.out), r.err)
			}
		})
	}
	t.Run("exit signal", func(t *testing.T) {
		r := g.ssh(nil, "-v", g.workspace(name).Hostname, "kill -TERM $$")
		if r.code != 255 || !strings.Contains(r.err, "signal") && !strings.Contains(r.err, "exit-signal") {
			t.Errorf("code %d, stderr %.2000s", r.code, r.err)
		}
	})
	t.Run("without certificate support", func(t *testing.T) {
		r := g.ssh(nil, "-o", "HostKeyAlgorithms=ssh-ed25519", g.workspace(name).Hostname, "echo plain")
		if r.code != 0 || r.out != "plain\n" {
			t.Errorf("code %d, out %q, err %q", r.code, r.out, r.err)
		}
	})
	t.Run("terminal", func(t *testing.T) {
		r := g.ssh(nil, "-tt", g.workspace(name).Hostname, "stty size; test -t 0 && echo tty")
		if r.code != 0 || !strings.Contains(r.out, "tty") {
			t.Errorf("code %d, out %q, err %q", r.code, r.out, r.err)
		}
	})
}

// testCopies moves files both ways and compares checksums.
func testCopies(t *testing.T, g *gateway, name string) {
	args := g.sshArgs()
	host := g.workspace(name).Hostname
	local, back := t.TempDir(), t.TempDir()
	write := func(file string, size int) {
		data := make([]byte, size)
		_, _ = rand.Read(data) // never fails
		if err := os.WriteFile(filepath.Join(local, file), data, 0o640); err != nil {
			t.Fatal(err)
		}
	}
	write("big", 3<<20)
	write("empty", 0)
	write("odd name ' $ ü", 1000)
	tree := "copied"
	tools := map[string][][]string{
		"scp": {
			append(append([]string{"scp", "-rp"}, args...), local, host+":"+tree+"-scp"),
			append(append([]string{"scp", "-rp"}, args...), host+":"+tree+"-scp", filepath.Join(back, "scp")),
		},
		"sftp": {
			append(append([]string{"sftp", "-b", "-"}, args...), host),
		},
	}
	for tool, commands := range tools {
		t.Run(tool, func(t *testing.T) {
			batch := []byte(nil)
			if tool == "sftp" {
				batch = []byte(fmt.Sprintf("mkdir %s-sftp\nput -r %s/* %s-sftp/\nlmkdir %s/sftp\nget -r %s-sftp/* %s/sftp/\n", tree, local, tree, back, tree, back))
			}
			for _, c := range commands {
				if r := do(t, nil, batch, c[0], c[1:]...); r.code != 0 {
					t.Fatalf("%s: exit %d\n%s%s", strings.Join(c, " "), r.code, r.out, r.err)
				}
			}
			if out, err := exec.Command("diff", "-r", local, filepath.Join(back, tool)).CombinedOutput(); err != nil {
				t.Errorf("the copy differs: %s", out)
			}
		})
	}
}

func TestDirectorySSH(t *testing.T) {
	g := startGateway(t)
	g.dir("demo")
	testSSH(t, g, "demo")
	testCopies(t, g, "demo")
	t.Run("200 times", func(t *testing.T) {
		args := append(g.sshArgs(), g.workspace("demo").Hostname, "echo o; echo e >&2; exit 7")
		for i := range 200 {
			if r := do(t, nil, nil, "ssh", args...); r.out != "o\n" || r.err != "e\n" || r.code != 7 {
				t.Fatalf("round %d: out %q, err %q, code %d", i, r.out, r.err, r.code)
			}
		}
	})
	t.Run("no helper stays", func(t *testing.T) {
		if left := processesOf(filepath.Join(bin, "helix") + "\x00proxy"); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	})
	t.Run("identity outlives everything", func(t *testing.T) {
		before := g.hostKey("demo")
		g.must("restart", "demo")
		g.stop()
		g.start()
		eventually(t, time.Minute, "running again", func() bool { return g.target("demo").State == "running" })
		if r := g.ssh(nil, g.workspace("demo").Hostname, "true"); r.code != 0 {
			t.Errorf("after restarts: code %d, %s", r.code, r.err)
		}
		if after := g.hostKey("demo"); !bytes.Equal(before, after) {
			t.Errorf("the host key changed:\n%s%s", before, after)
		}
		other := startGateway(t)
		other.dir("demo")
		if bytes.Equal(other.hostKey("demo"), before) {
			t.Error("two installations have one key")
		}
	})
}

// hostKey is what the workspace's address shows to anybody.
func (g *gateway) hostKey(name string) []byte {
	g.t.Helper()
	r := do(g.t, nil, nil, "ssh-keyscan", "-t", "ed25519", "-p", fmt.Sprint(g.info.SSHPort), g.workspace(name).Address)
	if r.code != 0 || r.out == "" {
		g.t.Fatalf("ssh-keyscan: %d %s", r.code, r.err)
	}
	_, key, _ := strings.Cut(r.out, " ") // without the address
	return []byte(key)
}

func TestUnreachableSaysWhy(t *testing.T) {
	g := startGateway(t)
	g.dir("demo")
	g.must("stop", "demo")
	for way, args := range g.ways("demo") {
		if r := do(t, nil, nil, "ssh", append(args, "true")...); r.code != 255 || r.out != "" || !strings.Contains(r.err, `workspace "demo" is stopped`) {
			t.Errorf("%s, stopped: code %d, out %q, err %q", way, r.code, r.out, r.err)
		}
	}
	for way, args := range map[string][]string{"jump host": append(g.sshArgs(), "-J", "gw."+g.info.Zone), "ProxyCommand": g.sshArgs()} {
		r := do(t, nil, nil, "ssh", append(args, "dmeo."+g.info.Zone, "true")...)
		if r.code != 255 || !strings.Contains(r.err, `there is no workspace "dmeo"`) || !strings.Contains(r.err, `"demo"`) {
			t.Errorf("%s, unknown: code %d, err %q", way, r.code, r.err)
		}
	}
	t.Run("other channels live on", func(t *testing.T) {
		g.dir("up")
		control := filepath.Join(g.state, "cm")
		gw := append(g.sshArgs(), "-S", control)
		host := "gw." + g.info.Zone
		if r := do(t, nil, nil, "ssh", append(gw, "-M", "-N", "-f", host)...); r.code != 0 {
			t.Fatalf("master: %s", r.err)
		}
		defer do(t, nil, nil, "ssh", append(gw, "-O", "exit", host)...)
		for range 2 {
			// The reason goes to the master's terminal; here it is that it fails.
			if r := do(t, nil, []byte("x"), "ssh", append(gw, "-W", "demo:22", host)...); r.code != 255 || r.out != "" {
				t.Errorf("to the stopped one: code %d, out %q, err %q", r.code, r.out, r.err)
			}
			if r := do(t, nil, []byte("x"), "ssh", append(gw, "-W", "up:22", host)...); !strings.HasPrefix(r.out, "SSH-2.0") {
				t.Errorf("to the running one: code %d, out %q, err %q", r.code, r.out, r.err)
			}
		}
	})
}
