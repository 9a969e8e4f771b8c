//go:build linux

package e2e

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/cavaliergopher/cpio"

	"helix.local/helix/gateway/api"
)

// bareBoot boots the machine of a launch plan with nothing in it but processor,
// memory, kernel and console, and a first process that writes one line.
type bareBoot struct {
	qemu string
	args []string
}

func newBareBoot(b *testing.B, g *gateway, name string) bareBoot {
	b.Helper()
	var plan struct {
		QEMU string   `json:"qemu"`
		Args []string `json:"args"`
	}
	g.json(&plan, "vm", "plan", name)
	initrd := filepath.Join(b.TempDir(), "initrd")
	if err := os.WriteFile(initrd, oneFile(b), 0o600); err != nil {
		b.Fatal(err)
	}
	boot := bareBoot{plan.QEMU, []string{
		"-no-user-config", "-nodefaults", "-display", "none", "-no-reboot", "-serial", "stdio", "-initrd", initrd,
	}}
	for i, arg := range plan.Args {
		if slices.Contains([]string{"-machine", "-accel", "-cpu", "-smp", "-m", "-kernel", "-append"}, arg) {
			boot.args = append(boot.args, arg, plan.Args[i+1])
		}
	}
	return boot
}

// oneFile is an initramfs with the smallest init.
func oneFile(b *testing.B) []byte {
	b.Helper()
	program := filepath.Join(b.TempDir(), "init")
	if out, err := exec.Command("gcc", "-Os", "-s", "-static", "-nostdlib", "-o", program, "testdata/init.c").CombinedOutput(); err != nil {
		b.Fatalf("build init: %v\n%s", err, out)
	}
	body, err := os.ReadFile(program)
	if err != nil {
		b.Fatal(err)
	}
	var archive bytes.Buffer
	w := cpio.NewWriter(&archive)
	if err := w.WriteHeader(&cpio.Header{Name: "init", Mode: cpio.TypeReg | 0o755, Size: int64(len(body))}); err != nil {
		b.Fatal(err)
	}
	if _, err := w.Write(body); err != nil {
		b.Fatal(err)
	}
	if err := w.Close(); err != nil {
		b.Fatal(err)
	}
	return archive.Bytes()
}

// run boots once and returns the time from QEMU's start to the line.
func (m bareBoot) run(b *testing.B) time.Duration {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, m.qemu, m.args...)
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	var said bytes.Buffer
	cmd.Stderr = &said
	began := time.Now()
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	var took time.Duration
	for lines := bufio.NewScanner(out); lines.Scan(); {
		if bytes.Contains(lines.Bytes(), []byte("first line")) {
			took = time.Since(began)
			break
		}
	}
	_ = cmd.Process.Kill() // it may have powered off
	_ = cmd.Wait()         // killed
	if took == 0 {
		b.Fatalf("bare boot: no line\n%s", said.Bytes())
	}
	return took
}

// timeline is a create as the events tell it.
type timeline struct {
	took   time.Duration            // of the command
	stages map[string]time.Duration // from each stage to the next
	order  []string
}

// create makes a workspace and watches it come up.
func (g *gateway) create(b *testing.B, name string, args ...string) timeline {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), limit)
	defer cancel()
	begun, ended := make(chan struct{}), make(chan error, 1)
	var events []api.Event
	c := api.NewClient(filepath.Join(g.state, "api.sock"))
	go func() {
		defer c.Close()
		errUp := errors.New("up")
		err := c.Events(ctx, api.New, name, func() { close(begun) }, func(e api.Event) error {
			events = append(events, e)
			if e.State == "running" || e.State == "failed" {
				return errUp
			}
			return nil
		})
		ended <- err
	}()
	select {
	case <-begun:
	case err := <-ended:
		b.Fatalf("watch %s: %v", name, err)
	}
	began := time.Now()
	g.must(append([]string{"create", name}, args...)...)
	t := timeline{took: time.Since(began), stages: make(map[string]time.Duration)}
	<-ended
	add := func(stage string, d time.Duration) {
		if _, ok := t.stages[stage]; !ok {
			t.order = append(t.order, stage)
		}
		t.stages[stage] += d
	}
	stage, last := "request", began
	for _, e := range events {
		add(stage, e.Time.Sub(last))
		last = e.Time
		if e.State == "starting" && e.Stage != "" {
			stage = e.Stage
		}
	}
	if len(events) == 0 || events[len(events)-1].State != "running" {
		b.Fatalf("create %s: events are %+v", name, events)
	}
	add("answer", began.Add(t.took).Sub(last))
	return t
}

// BenchmarkCreate is "helix create" of the tiny image, from the command's start
// to its end at level 2, against the best bare boot of that kernel on this
// machine to its first line of user space. It tells where the time goes.
func BenchmarkCreate(b *testing.B) {
	g := startVMGateway(b)
	g.must("create", "plan", "--image", "tiny", "--no-start")
	bare := newBareBoot(b, g, "plan")
	folder := b.TempDir()
	bare.run(b) // both find their files in the page cache
	c := newComparison(b)
	var order []string
	for b.Loop() {
		c.add("bare", bare.run(b).Seconds())
		t := g.create(b, "demo", "--image", "tiny")
		c.add("create", t.took.Seconds())
		for stage, took := range t.stages {
			c.add(stage, took.Seconds())
		}
		order = t.order
		g.must("rm", "demo")
		c.add("dir", g.create(b, "site", "--dir", folder).took.Seconds())
		g.must("rm", "site")
	}
	c.report("bare", 1000, "bare-ms")
	c.report("create", 1000, "create-ms")
	c.report("dir", 1000, "create-dir-ms")
	for i, stage := range order {
		c.report(stage, 1000, fmt.Sprintf("stage%d-%s-ms", i+1, stage))
	}
	c.ratio("create", "bare", "ratio-vs-bare")
	c.done()
}
