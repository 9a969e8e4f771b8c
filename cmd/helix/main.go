// Helix is the command line of the gateway, and with "helix up" the gateway
// itself. Every other command is a client of the API on the gateway's unix
// socket; "helix help exit-codes" says what their exit codes mean.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"sync"
	"syscall"

	"github.com/spf13/cobra"

	"helix.local/helix/gateway/api"
)

func main() { os.Exit(program()) }

// program is main without the exit, so that deferred calls run.
func program() int {
	ctx, stop := untilSignal(context.Background())
	defer stop()
	a := &app{stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr, getenv: os.Getenv}
	return a.run(ctx, os.Args[1:])
}

// app is one invocation: where it reads and writes, and what the global flags
// say.
type app struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	getenv         func(string) string

	stateFlag string
	json      bool
	began     bool // the command line was understood, and the command runs
}

// run does what args ask and returns the exit code.
func (a *app) run(ctx context.Context, args []string) int {
	out := &sink{w: a.stdout}
	a.stdout = out
	root := a.root()
	root.SetArgs(args)
	root.SetIn(a.stdin)
	root.SetOut(a.stdout)
	root.SetErr(a.stderr)
	cmd, err := root.ExecuteContextC(ctx)
	if err != nil && !a.began {
		if _, ours := errors.AsType[*usageError](err); !ours {
			err = &usageError{Message: err.Error(), Cure: "see: " + cmd.CommandPath() + " --help"}
		}
	}
	if err == nil {
		err = out.err
	}
	return a.report(err)
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "helix",
		Short: "Give every workspace a name that ssh, browsers and everything else can reach",
		Long: `Helix gives every workspace a hostname, NAME.helix.local, and makes ssh, HTTPS
and any TCP port behind that name work. A workspace is a virtual machine or a
folder of this machine.

  helix up                                run the gateway (keep it running)
  helix create demo --dir .               a workspace of this folder
  helix create box --image tiny           a workspace in a virtual machine
  helix ssh demo                          a shell in it`,
		SilenceErrors: true, SilenceUsage: true,
		PersistentPreRun: func(*cobra.Command, []string) { a.began = true },
	}
	root.PersistentFlags().StringVar(&a.stateFlag, "state", "", "state `folder` of the gateway (default $HELIX_STATE, else helix in the user's state folder)")
	root.PersistentFlags().BoolVar(&a.json, "json", false, "print JSON")
	root.CompletionOptions.SetDefaultShellCompDirective(cobra.ShellCompDirectiveNoFileComp)
	group(root)
	root.AddCommand(a.upCommand(), a.createCommand(), a.lsCommand(), a.statusCommand())
	root.AddCommand(a.lifecycleCommands()...)
	root.AddCommand(a.rmCommand(), a.sshCommand(), a.execCommand(), a.logsCommand(), a.portsCommand(), a.openCommand(),
		a.eventsCommand(), a.vmCommand(), a.imageCommand(), a.keyCommand(), a.sshConfigCommand(), a.caCommand(),
		a.proxyCommand(), a.shimCommand(), a.versionCommand(), exitCodesTopic())
	root.SetHelpCommand(helpCommand(root))
	return root
}

// group makes cmd a command that does nothing but hold others: without
// arguments it helps, with an unknown one it suggests.
func group(cmd *cobra.Command) {
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return nil
		}
		return unknownCommand(cmd, args[0])
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
}

func unknownCommand(parent *cobra.Command, name string) error {
	e := &usageError{
		Message: fmt.Sprintf("unknown command %q of %q", name, parent.CommandPath()),
		Cure:    "see: " + parent.CommandPath() + " --help",
	}
	parent.SuggestionsMinimumDistance = 2
	if near := parent.SuggestionsFor(name); len(near) > 0 {
		e.Cure = "did you mean: " + parent.CommandPath() + " " + near[0]
	}
	return e
}

func helpCommand(root *cobra.Command) *cobra.Command {
	return &cobra.Command{
		Use: "help [COMMAND...]", Short: "Explain a command",
		RunE: func(_ *cobra.Command, args []string) error {
			cmd, rest, err := root.Find(args)
			if err != nil || len(rest) > 0 {
				return unknownCommand(cmd, rest[0])
			}
			cmd.InitDefaultHelpFlag()
			return cmd.Help()
		},
	}
}

// state is the gateway's state folder.
func (a *app) state() (string, error) {
	folder := a.stateFlag
	if folder == "" {
		folder = a.getenv("HELIX_STATE")
	}
	if folder == "" {
		base := a.getenv("XDG_STATE_HOME")
		if base == "" {
			home, err := os.UserHomeDir()
			if err != nil {
				return "", &hintError{fmt.Errorf("find the state folder: %w", err), "name it with --state"}
			}
			base = filepath.Join(home, ".local", "state")
		}
		folder = filepath.Join(base, "helix")
	}
	abs, err := filepath.Abs(folder)
	if err != nil {
		return "", fmt.Errorf("find the state folder %q: %w", folder, err)
	}
	return abs, nil
}

// socketMax is the longest path of a unix socket that every system takes:
// sun_path has 104 bytes on macOS and 108 on Linux, with a final zero.
const socketMax = 103

// socket is the path of one of the gateway's sockets.
func (a *app) socket(name string) (string, error) {
	state, err := a.state()
	if err != nil {
		return "", err
	}
	path := filepath.Join(state, name)
	if len(path) > socketMax {
		return "", &hintError{
			fmt.Errorf("socket path %s has %d bytes: the system takes %d", path, len(path), socketMax),
			"name a shorter folder with --state",
		}
	}
	return path, nil
}

// withClient calls f with a client of the running gateway.
func (a *app) withClient(f func(*api.Client) error) error {
	path, err := a.socket("api.sock")
	if err != nil {
		return err
	}
	c := api.NewClient(path)
	defer c.Close()
	return f(c)
}

// sink keeps the first error of writing to standard output: an answer that is
// cut short by a full disk is no success.
type sink struct {
	w   io.Writer
	err error
}

func (s *sink) Write(p []byte) (int, error) {
	n, err := s.w.Write(p)
	if err != nil && s.err == nil {
		s.err = fmt.Errorf("write standard output: %w", err)
	}
	return n, err
}

// signalError is the cause of a context that a signal has ended.
type signalError struct{ signal syscall.Signal }

func (e signalError) Error() string { return e.signal.String() }

// untilSignal returns a context that the first SIGINT or SIGTERM ends. The
// second does what it does to any program.
func untilSignal(parent context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(parent)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	var watch sync.WaitGroup
	watch.Go(func() {
		select {
		case s := <-signals:
			signal.Stop(signals)
			number, _ := s.(syscall.Signal) // it is one on every system of ours
			cancel(signalError{number})
		case <-ctx.Done():
		}
	})
	return ctx, func() {
		signal.Stop(signals)
		cancel(nil)
		watch.Wait()
	}
}
