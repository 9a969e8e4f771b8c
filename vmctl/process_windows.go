package vmctl

import (
	"context"
	"fmt"
	"os/exec"
)

func runOwned(cmd *exec.Cmd, _ func()) error {
	return fmt.Errorf("run %s: %w", cmd.Path, ErrUnsupported)
}

func detach(*exec.Cmd) {}

func killHolders(_ context.Context, path string) error {
	return fmt.Errorf("find who holds %s: %w", path, ErrUnsupported)
}
