package gateway

import (
	"os/exec"
	"syscall"
	"testing"
)

func TestStraysAreEndedAndOthersAreNot(t *testing.T) {
	start := func(env ...string) *exec.Cmd {
		t.Helper()
		cmd := exec.Command("sleep", "600")
		cmd.Env = append([]string{"PATH=/usr/bin:/bin"}, env...)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return cmd
	}
	stray, other, none := start("HELIX_TARGET=abc"), start("HELIX_TARGET=abcd"), start("X=HELIX_TARGET=abc")
	ended := make(chan error, 1)
	go func() { ended <- stray.Wait() }()
	if err := endStrays("abc"); err != nil {
		t.Error(err)
	}
	if err := <-ended; err == nil {
		t.Error("the stray ended well")
	}
	for _, cmd := range []*exec.Cmd{other, none} {
		if err := cmd.Process.Signal(syscall.Signal(0)); err != nil {
			t.Errorf("a bystander is gone: %v", err)
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // killed
	}
}
