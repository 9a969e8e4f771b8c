// Command helix-agent runs in a workspace's target and serves it to the
// gateway. As the first process of a virtual machine it takes no arguments.
//
// It exits with 0 after an orderly end, 1 when it failed, and 2 when it was
// called wrongly.
package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"helix.local/helix/agent"
	"helix.local/helix/agent/session"
)

// version is set by the linker.
var version = "dev"

const usage = `usage: helix-agent COMMAND

The gateway starts this program; people rarely do.

  dir          serve a folder: parameters on standard input, link on descriptor 3
  sftp-server  serve the file system over standard input and output
  version      print the version
`

func main() {
	if os.Getpid() == 1 {
		firstProcess()
	}
	os.Exit(run(os.Args[1:]))
}

func run(args []string) int {
	var err error
	switch {
	case len(args) == 1 && args[0] == "dir":
		err = serveDir()
	case len(args) == 1 && args[0] == agent.SFTPCommand:
		err = session.ServeSFTP(standard{os.Stdin, os.Stdout}, ".")
	case len(args) == 1 && args[0] == "version":
		_, err = fmt.Fprintln(os.Stdout, version)
	default:
		_, _ = io.WriteString(os.Stderr, usage) // nobody to tell
		return 2
	}
	if err != nil {
		_, _ = fmt.Fprintln(os.Stderr, "helix-agent:", err) // nobody to tell
		return 1
	}
	return 0
}

// firstProcess never returns: the kernel panics when the first process ends.
func firstProcess() {
	if err := agent.RunGuest(version, os.Stdout); err != nil {
		_, _ = fmt.Fprintln(os.Stdout, "helix-agent:", err) // nobody to tell
	}
	select {}
}

func serveDir() error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	return agent.RunDir(ctx, agent.DirConfig{
		Boot: os.Stdin, Link: os.NewFile(3, "link"), Env: os.Environ(), Version: version,
		Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
	})
}

// standard is the pair of standard streams.
type standard struct {
	io.Reader
	io.WriteCloser
}
