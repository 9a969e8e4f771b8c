package vmctl

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// wantNothing checks that nothing of a machine is left but what is meant to stay.
func wantNothing(t *testing.T, runDir string) {
	t.Helper()
	lock, err := lockRun(filepath.Join(runDir, "shim.lock"))
	if errors.Is(err, fs.ErrNotExist) {
		return // not even a folder
	}
	if err != nil {
		t.Errorf("lock: %v", err)
	} else if err := lock.Close(); err != nil {
		t.Error(err)
	}
	if left, err := transient(runDir); err != nil || len(left) > 0 {
		t.Errorf("files left: %v, %v", left, err)
	}
	if left := processesOf(t, runDir); len(left) > 0 {
		t.Errorf("processes left: %v", left)
	}
}

// processesOf lists the processes that have text on their command line.
func processesOf(t *testing.T, text string) []string {
	t.Helper()
	found, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	var list []string
	for _, path := range found {
		line, err := os.ReadFile(path)
		if err == nil && strings.Contains(string(line), text) {
			list = append(list, strings.ReplaceAll(string(line), "\x00", " "))
		}
	}
	return list
}

func limited(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func signalShim(t *testing.T, vm *VM, pick func(Status) int, sig syscall.Signal) {
	t.Helper()
	st, err := vm.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pick(st), sig); err != nil {
		t.Fatal(err)
	}
}

func TestKillQEMU(t *testing.T) {
	m, h := testMachine(t)
	for range 2 { // the next start works first time
		vm := startMachine(t, m, h)
		signalShim(t, vm, func(s Status) int { return s.QEMUPID }, syscall.SIGKILL)
		exit, err := vm.Wait(limited(t))
		if err != nil || exit.State != Failed || exit.Reason != ExitCrash || !strings.Contains(exit.Detail, "killed") {
			t.Errorf("exit is %+v, %v", exit, err)
		}
		wantNothing(t, m.RunDir)
		if kept, err := ReadExit(m.RunDir); err != nil || kept.Reason != ExitCrash {
			t.Errorf("exit on disk is %+v, %v", kept, err)
		}
	}
}

func TestKillShimTakesQEMUAlong(t *testing.T) {
	m, h := testMachine(t)
	vm := startMachine(t, m, h)
	signalShim(t, vm, func(s Status) int { return s.ShimPID }, syscall.SIGKILL)
	exit, err := vm.Wait(limited(t))
	if err != nil || exit.State != Failed || exit.Reason != ExitShimDied {
		t.Errorf("exit is %+v, %v", exit, err)
	}
	if _, err := Adopt(limited(t), m.RunDir, m.UUID, m.Generation); !errors.Is(err, ErrNotRunning) {
		t.Errorf("adopt gave %v", err)
	}
	if err := Clean(m.RunDir); err != nil {
		t.Error(err)
	}
	wantNothing(t, m.RunDir)
	vm = startMachine(t, m, h)
	if _, err := vm.Kill(limited(t)); err != nil {
		t.Error(err)
	}
}

func TestTermEndsShim(t *testing.T) {
	m, h := testMachine(t)
	vm := startMachine(t, m, h)
	signalShim(t, vm, func(s Status) int { return s.ShimPID }, syscall.SIGTERM)
	exit, err := vm.Wait(limited(t))
	if err != nil || exit.State != Exited || exit.Reason != ExitQuit {
		t.Errorf("exit is %+v, %v", exit, err)
	}
	wantNothing(t, m.RunDir)
}

func TestAdopt(t *testing.T) {
	m, h := testMachine(t)
	if _, err := Adopt(limited(t), m.RunDir, m.UUID, m.Generation); !errors.Is(err, ErrNotRunning) {
		t.Errorf("before the start: %v", err)
	}
	if err := Clean(m.RunDir); err != nil {
		t.Errorf("clean what is not there: %v", err)
	}
	first := startMachine(t, m, h)
	vm, err := Adopt(limited(t), m.RunDir, m.UUID, m.Generation)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Adopt(limited(t), m.RunDir, m.UUID, m.Generation+1); !errors.Is(err, ErrOtherMachine) {
		t.Errorf("another generation: %v", err)
	}
	if _, err := Adopt(limited(t), m.RunDir, "other", m.Generation); !errors.Is(err, ErrOtherMachine) {
		t.Errorf("another UUID: %v", err)
	}
	if _, err := Start(limited(t), first.Plan(), startConfig(t)); !errors.Is(err, ErrRunning) {
		t.Errorf("second start: %v", err)
	}
	if err := Clean(m.RunDir); !errors.Is(err, ErrRunning) {
		t.Errorf("clean while running: %v", err)
	}
	// The refused start must not have harmed the machine.
	if st, err := vm.Status(t.Context()); err != nil || st.State != Running {
		t.Errorf("status is %+v, %v", st, err)
	}
	exit, err := vm.Kill(limited(t))
	if err != nil || exit.Reason != ExitKilled || exit.State != Exited {
		t.Errorf("kill gave %+v, %v", exit, err)
	}
	if _, err := Adopt(limited(t), m.RunDir, m.UUID, m.Generation); !errors.Is(err, ErrNotRunning) {
		t.Errorf("after the kill: %v", err)
	}
	wantNothing(t, m.RunDir)
}

func TestHungShimIsFoundByItsLock(t *testing.T) {
	m, h := testMachine(t)
	p, err := NewPlan(m, h)
	if err != nil {
		t.Fatal(err)
	}
	p.Stop = []Limit{{string(PhaseQuit), 200 * time.Millisecond}, {string(PhaseKill), 200 * time.Millisecond}}
	vm, err := Start(limited(t), p, startConfig(t))
	if err != nil {
		t.Fatal(err)
	}
	signalShim(t, vm, func(s Status) int { return s.ShimPID }, syscall.SIGSTOP)
	short, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := Adopt(short, m.RunDir, m.UUID, m.Generation); err == nil || errors.Is(err, ErrNotRunning) {
		t.Errorf("adopt of a hung shim gave %v", err)
	}
	exit, err := vm.Stop(limited(t), StopConfig{})
	if err != nil || exit.Reason != ExitKilled {
		t.Errorf("stop gave %+v, %v", exit, err)
	}
	wantNothing(t, m.RunDir)
}

// An unrelated process whose number stands in every file must live.
func TestForeignPIDIsNotKilled(t *testing.T) {
	m, h := testMachine(t)
	bystander := exec.CommandContext(t.Context(), "sleep", "600")
	if err := bystander.Start(); err != nil {
		t.Fatal(err)
	}
	pid := bystander.Process.Pid
	p, err := NewPlan(m, h)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(m.RunDir, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{p.Files.Lock, p.Files.ShimLog, p.Sockets.Shim, p.Files.Exit, filepath.Join(m.RunDir, "pid")} {
		if err := os.WriteFile(path, fmt.Appendln(nil, pid), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := writeJSON(p.Files.Plan, p); err != nil {
		t.Fatal(err)
	}
	if _, err := Adopt(limited(t), m.RunDir, m.UUID, m.Generation); !errors.Is(err, ErrNotRunning) {
		t.Errorf("adopt gave %v", err)
	}
	vm := &VM{plan: p, client: newClient(p.Sockets.Shim)}
	if _, err := vm.Kill(limited(t)); err != nil {
		t.Error(err)
	}
	if err := Kill(limited(t), m.RunDir); err != nil {
		t.Error(err)
	}
	if err := Clean(m.RunDir); err != nil {
		t.Error(err)
	}
	if err := syscall.Kill(pid, 0); err != nil {
		t.Errorf("the bystander: %v", err)
	}
	if err := bystander.Process.Kill(); err != nil {
		t.Error(err)
	}
	var end *exec.ExitError
	if err := bystander.Wait(); !errors.As(err, &end) {
		t.Errorf("bystander ended with %v", err)
	}
}

// script writes a program that stands in for QEMU where a fault is wanted.
func script(t *testing.T, body string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "qemu")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+body+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestFaultyStarts(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		spoil func(*Plan, *StartConfig)
		step  Step
		text  string
		hint  string
	}{
		"QEMU ends at once": {func(p *Plan, _ *StartConfig) {
			p.QEMU = script(t, `echo "qemu: could not do it" >&2; exit 3`)
		}, StepQEMU, "qemu: could not do it", ""},
		"QEMU refuses an option": {func(p *Plan, _ *StartConfig) { p.Args = append(p.Args, "-no-such-option") }, StepQEMU, "no-such-option", ""},
		"QEMU is no program": {func(p *Plan, _ *StartConfig) {
			p.QEMU = filepath.Join(t.TempDir(), "none")
		}, StepPrepare, "no such file", "install QEMU"},
		"QEMU cannot be run":    {func(p *Plan, _ *StartConfig) { p.QEMU = "/etc/hostname" }, StepQEMU, "run /etc/hostname", ""},
		"monitor never listens": {func(p *Plan, _ *StartConfig) { p.QEMU = script(t, "exec sleep 600") }, StepQEMU, "not done after", ""},
		"monitor says nothing": {func(p *Plan, _ *StartConfig) {
			p.QEMU = script(t, "exec "+self+` fakeqemu mute "$@"`)
		}, StepQEMU, "not done after", ""},
		"monitor refuses": {func(p *Plan, _ *StartConfig) {
			p.QEMU = script(t, "exec "+self+` fakeqemu refuse "$@"`)
		}, StepNetwork, "no such monitor", ""},
		"network is another": {func(p *Plan, _ *StartConfig) {
			p.QEMU = script(t, "exec "+self+` fakeqemu usernet "$@"`)
		}, StepNetwork, `backend type is "user", planned is "stream"`, ""},
		"no mke2fs":     {func(p *Plan, _ *StartConfig) { p.Disk.Make = "" }, StepDisk, "mke2fs is not installed", "e2fsprogs"},
		"mke2fs fails":  {func(p *Plan, _ *StartConfig) { p.Disk.Bytes = 1000 }, StepDisk, "mke2fs", ""},
		"no shim":       {func(_ *Plan, c *StartConfig) { c.Helix = "/nonexistent/helix" }, StepShim, "no such file", ""},
		"shim is wrong": {func(_ *Plan, c *StartConfig) { c.Helix = script(t, "echo what is vmshim >&2; exit 2") }, StepShim, "what is vmshim", ""},
		"shim is mute":  {func(_ *Plan, c *StartConfig) { c.Helix = script(t, "exec sleep 600") }, StepShim, "does not answer", ""},
		"no boot":       {func(_ *Plan, c *StartConfig) { c.Boot = nil }, StepShim, "boot secret", ""},
	} {
		t.Run(name, func(t *testing.T) {
			m, h := testMachine(t)
			p, err := NewPlan(m, h)
			if err != nil {
				t.Fatal(err)
			}
			for i := range p.Steps {
				p.Steps[i].Timeout = time.Second
			}
			cfg := startConfig(t)
			c.spoil(&p, &cfg)
			_, err = Start(limited(t), p, cfg)
			var step *StepError
			if !errors.As(err, &step) || step.Step != c.step || !strings.Contains(err.Error(), c.text) {
				t.Errorf("start gave %v, want step %s with %q", err, c.step, c.text)
			}
			if step != nil && !strings.Contains(step.Hint(), c.hint) {
				t.Errorf("hint is %q, want %q in it", step.Hint(), c.hint)
			}
			wantNothing(t, m.RunDir)
		})
	}
}

func TestCancelledStartLeavesNothing(t *testing.T) {
	for _, at := range []Step{StepPrepare, StepDisk, StepShim, StepQEMU, StepNetwork} {
		t.Run(string(at), func(t *testing.T) {
			m, h := testMachine(t)
			p, err := NewPlan(m, h)
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			cfg := startConfig(t)
			cfg.Progress = func(e StepEvent) {
				if e.Step == at && !e.Done {
					cancel()
				}
			}
			vm, err := Start(ctx, p, cfg)
			if err == nil { // the shim was faster
				if _, err := vm.Kill(limited(t)); err != nil {
					t.Error(err)
				}
			}
			wantNothing(t, m.RunDir)
		})
	}
}

// A gateway that is killed in a start leaves a machine that runs, or none.
func TestStarterKilledAtEachStep(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, at := range []Step{StepPrepare, StepDisk, StepShim, StepQEMU, StepNetwork} {
		t.Run(string(at), func(t *testing.T) {
			m, h := testMachine(t)
			p, err := NewPlan(m, h)
			if err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(t.TempDir(), "plan.json")
			if err := writeJSON(path, p); err != nil {
				t.Fatal(err)
			}
			text, err := exec.CommandContext(t.Context(), self, "startanddie", path, string(at)).CombinedOutput()
			if err == nil || len(text) > 0 {
				t.Fatalf("starter ended with %v: %s", err, text)
			}
			vm, err := Adopt(limited(t), m.RunDir, m.UUID, m.Generation)
			switch {
			case errors.Is(err, ErrNotRunning):
			case err != nil:
				t.Fatal(err)
			default:
				if err := vm.Watch(limited(t), func(s Status) bool { return s.State == Starting }); err != nil {
					t.Error(err)
				}
				if st, err := vm.Status(t.Context()); err != nil || st.State != Running {
					t.Errorf("adopted machine is %+v, %v", st, err)
				}
				if _, err := vm.Kill(limited(t)); err != nil {
					t.Error(err)
				}
			}
			if err := Clean(m.RunDir); err != nil {
				t.Error(err)
			}
			wantNothing(t, m.RunDir)
		})
	}
}

func TestSecretIsNowhere(t *testing.T) {
	m, h := testMachine(t)
	vm := startMachine(t, m, h)
	g, _ := meet(t, vm)
	if left := processesOf(t, bootSecret); len(left) > 0 {
		t.Errorf("secret on command lines: %v", left)
	}
	err := filepath.WalkDir(m.RunDir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() || d.Name() == "workspace.img" {
			return err
		}
		body, err := os.ReadFile(path)
		if bytes.Contains(body, []byte(bootSecret)) {
			t.Errorf("secret in %s", path)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	if info, err := os.Stat(m.RunDir); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("run folder is %v, %v", info.Mode(), err)
	}
	g.tell(guestRequest{Do: "reboot"})
	exit, err := vm.Wait(limited(t))
	if err != nil || exit.State != Failed || exit.Reason != ExitGuestReset || exit.Phase != "" {
		t.Errorf("after a reset: %+v, %v", exit, err)
	}
}

func TestPanicShowsConsole(t *testing.T) {
	m, h := testMachine(t)
	h.TSCKHz = 0 // q35 boots too
	vm := startMachine(t, m, h)
	g, _ := meet(t, vm)
	g.tell(guestRequest{Do: "crash"})
	exit, err := vm.Wait(limited(t))
	if err != nil || exit.State != Failed || exit.Reason != ExitGuestReset {
		t.Errorf("after a panic: %+v, %v", exit, err)
	}
	if !strings.Contains(exit.Detail, "Kernel panic") || len(exit.Lines) == 0 {
		t.Errorf("exit tells %q and %q", exit.Detail, exit.Lines)
	}
	var log bytes.Buffer
	if err := ReadConsole(&log, vm.Plan()); err != nil || !strings.Contains(log.String(), "sysrq triggered crash") {
		t.Errorf("console log is %q, %v", log.String(), err)
	}
}

func TestStopGoesOnToHarderPhases(t *testing.T) {
	m, h := testMachine(t)
	p, err := NewPlan(m, h)
	if err != nil {
		t.Fatal(err)
	}
	p.Stop[0].Timeout, p.Stop[1].Timeout = 100*time.Millisecond, 100*time.Millisecond
	vm, err := Start(limited(t), p, startConfig(t))
	if err != nil {
		t.Fatal(err)
	}
	var phases []string
	exit, err := vm.Stop(limited(t), StopConfig{
		AgentShutdown: func(context.Context) error { return errors.New("agent is away") },
		Progress: func(p StopPhase, err error) {
			if err == nil {
				phases = append(phases, string(p))
			}
		},
	})
	if err != nil || exit.Reason != ExitQuit || exit.Phase != PhaseQuit || strings.Join(phases, " ") != "agent acpi quit" {
		t.Errorf("stop gave %+v, %v after phases %v", exit, err, phases)
	}
	if again, err := vm.Stop(limited(t), StopConfig{}); err != nil || again.Reason != ExitQuit {
		t.Errorf("second stop gave %+v, %v", again, err)
	}
	wantNothing(t, m.RunDir)
}

// Whoever looks whether a machine runs holds its lock for a moment; that must not
// pass for a machine.
func TestLookingDoesNotLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "shim.lock")
	stop, looked := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			select {
			case <-stop:
				looked <- nil
				return
			default:
			}
			if err := held(path); err != nil && !errors.Is(err, ErrRunning) {
				looked <- err
				return
			}
		}
	}()
	for range 200 {
		lock, err := lockRun(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := lock.Close(); err != nil {
			t.Fatal(err)
		}
	}
	close(stop)
	if err := <-looked; err != nil {
		t.Error(err)
	}
}
