//go:build !linux

package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
)

// DirConfig is what RunDir needs to know.
type DirConfig struct {
	Boot    io.Reader // one line of JSON, a wire.Boot
	Link    *os.File  // one end of a socket pair with the gateway
	Env     []string  // where the programs' environment starts
	Version string
	Log     *slog.Logger // may be nil
}

// RunDir needs Linux: only there an agent can find and end all that was
// started in its folder.
func RunDir(context.Context, DirConfig) error {
	return fmt.Errorf("serve a folder: %w on this system", errors.ErrUnsupported)
}

// RunGuest needs Linux.
func RunGuest(string, io.Writer) error {
	return fmt.Errorf("run as the first process of a guest: %w on this system", errors.ErrUnsupported)
}
