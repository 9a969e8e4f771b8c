//go:build linux

package e2e

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

func TestLostRegistryLosesNoDisk(t *testing.T) {
	g := startVMGateway(t)
	g.must("create", "demo", "--image", "tiny")
	g.must("exec", "demo", "--", "sh", "-c", "echo mine >/workspace/mine; sync")
	pid := g.vmProcess("demo", "qemu-system")
	for name, damage := range map[string]func(path string) error{
		"overwritten": func(path string) error { return overwrite(path, 8<<10) },
		"cut short":   func(path string) error { return os.Truncate(path, 5000) },
	} {
		g.stop()
		path := filepath.Join(g.state, "registry.db")
		good, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := damage(path); err != nil {
			t.Fatal(err)
		}
		r := g.helix("up", "--range", g.net.String())
		if r.code != 1 || !strings.Contains(r.err, "damaged") || !strings.Contains(r.err, "hint:") || strings.Contains(r.err, "runtime error") {
			t.Errorf("%s: exit %d, %q", name, r.code, r.err)
		}
		// As the hint says: moved away, and a gateway starts without any workspace.
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		g.start()
		if got := g.must("status"); !strings.Contains(got, "does not know") {
			t.Errorf("%s: the stranger is not told of: %s", name, got)
		}
		if r := g.helix("create", "demo", "--image", "tiny"); r.code != 2 {
			t.Errorf("%s: created over a stranger: exit %d %s", name, r.code, r.err)
		}
		g.stop()
		if err := os.WriteFile(path, good, 0o600); err != nil {
			t.Fatal(err)
		}
		g.start()
	}
	if now := g.vmProcess("demo", "qemu-system"); now != pid {
		t.Error("the machine was started anew")
	}
	if got := g.must("exec", "demo", "--", "cat", "/workspace/mine"); got != "mine\n" {
		t.Errorf("file: %q", got)
	}
}

func overwrite(path string, n int) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	if _, err := f.Write(bytes.Repeat([]byte("garbage "), n/8)); err != nil {
		return err
	}
	return f.Close()
}

func TestOneWinnerOfManyCreates(t *testing.T) {
	g := startGateway(t)
	var won, lost atomic.Int32
	var work sync.WaitGroup
	for range 8 {
		folder := t.TempDir()
		work.Go(func() {
			switch r := g.helix("create", "demo", "--dir", folder); r.code {
			case 0:
				won.Add(1)
				if got := g.workspace("demo").Targets[0].Dir; got != folder {
					t.Errorf("told of success for %s, but it is %s", folder, got)
				}
			case 4:
				lost.Add(1)
			default:
				t.Errorf("exit %d: %s", r.code, r.err)
			}
		})
	}
	work.Wait()
	if won.Load() != 1 || lost.Load() != 7 {
		t.Errorf("%d won, %d lost", won.Load(), lost.Load())
	}
}

func TestVanishedFolder(t *testing.T) {
	g := startGateway(t)
	folder := filepath.Join(t.TempDir(), "gone")
	if err := os.Mkdir(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	g.must("create", "demo", "--dir", folder)
	if err := os.Remove(folder); err != nil {
		t.Fatal(err)
	}
	if r := g.helix("exec", "demo", "--", "pwd"); r.code == 0 || r.out != "" {
		t.Errorf("exec in a folder that is gone: exit %d, %q", r.code, r.out)
	}
	if r := g.helix("restart", "demo"); r.code != 6 || !strings.Contains(r.err, folder) {
		t.Errorf("restart: exit %d, %q", r.code, r.err)
	}
	if target := g.target("demo"); target.State != "failed" || target.Reason == "" {
		t.Errorf("after that: %+v", target)
	}
}

func TestBadInput(t *testing.T) {
	g := startGateway(t)
	g.dir("demo")
	unreadable := filepath.Join(t.TempDir(), "unreadable")
	if err := os.Mkdir(unreadable, 0); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	cases := map[string]struct {
		args []string
		code int
		says string
	}{
		"unknown image":      {[]string{"create", "x", "--image", "tyni"}, 3, "tyni"},
		"unknown recipe":     {[]string{"image", "build", "nope"}, 3, "recipes: tiny"},
		"missing folder":     {[]string{"create", "x", "--dir", "/nowhere/at/all"}, 2, "/nowhere/at/all"},
		"a file":             {[]string{"create", "x", "--dir", file}, 2, "not a folder"},
		"bad name":           {[]string{"create", "Bad_Name", "--dir", "/tmp"}, 2, "Bad_Name"},
		"reserved name":      {[]string{"create", "gw", "--dir", "/tmp"}, 2, "gw"},
		"name taken":         {[]string{"create", "demo", "--dir", "/tmp"}, 4, "exists"},
		"both":               {[]string{"create", "x", "--dir", "/tmp", "--image", "tiny"}, 2, "image"},
		"unknown name":       {[]string{"status", "dmeo"}, 3, `"demo"`},
		"unknown key":        {[]string{"key", "rm", "nobody"}, 3, "nobody"},
		"events of nobody":   {[]string{"events", "dmeo"}, 3, `"demo"`},
		"unknown command":    {[]string{"crate"}, 2, "create"},
		"second gateway":     {[]string{"up", "--range", g.net.String()}, 4, "process"},
		"bad range":          {[]string{"up", "--range", "10.0.0.0/16"}, 2, "range"},
		"no folder to start": {[]string{"create", "x"}, 2, "image"},
	}
	if os.Geteuid() != 0 { // root reads everything
		cases["unreadable folder"] = struct {
			args []string
			code int
			says string
		}{[]string{"create", "x", "--dir", unreadable}, 2, "permission denied"}
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			r := g.helix(c.args...)
			if r.code != c.code || !strings.Contains(r.err, c.says) {
				t.Errorf("exit %d, want %d; stderr %q, want %q in it", r.code, c.code, r.err, c.says)
			}
			if line, _, _ := strings.Cut(r.err, "\n"); !strings.HasPrefix(line, "helix: ") {
				t.Errorf("first line %q", line)
			}
		})
	}
	if got := len(g.list()); got != 1 {
		t.Errorf("%d workspaces afterwards, want the one from before", got)
	}
}
