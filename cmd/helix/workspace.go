package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"helix.local/helix/gateway/api"
)

type createFlags struct {
	api.CreateRequest
	memory   string
	services []string
	noWait   bool
}

func (a *app) createCommand() *cobra.Command {
	var f createFlags
	cmd := &cobra.Command{
		Use: "create NAME (--image IMAGE | --dir FOLDER)", Short: "Make a workspace and start it",
		Long: `Make a workspace and start it. The name becomes a hostname, so it is made of
letters, digits and hyphens.`,
		Example: `  helix create demo --dir .
  helix create box --image tiny --cpus 2 --memory 1G
  helix create web --dir ~/site --service app=5173`,
		Args: exactly("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error { return a.create(cmd.Context(), args[0], f) },
	}
	flags := cmd.Flags()
	flags.StringVar(&f.Image, "image", "", "run a virtual machine from this `image`")
	flags.StringVar(&f.Dir, "dir", "", "work in this `folder` of this machine")
	flags.IntVar(&f.CPUs, "cpus", 0, "virtual `CPUs` (0: the default)")
	flags.StringVar(&f.memory, "memory", "", "memory of the virtual machine, as in 512M or 2G (empty: the default)")
	flags.StringVar(&f.Policy, "policy", "", "what the virtual machine may reach: internet (default) or none")
	flags.StringVar(&f.Accel, "accel", "", "auto (default), kvm or tcg")
	flags.StringArrayVar(&f.services, "service", nil, "name a port, as in `NAME=PORT[/PROTO]`; PROTO is http (default), https, h2c, tls or tcp; repeatable")
	flags.BoolVar(&f.NoStart, "no-start", false, "leave it stopped")
	flags.BoolVar(&f.noWait, "no-wait", false, "do not wait until it is ready")
	fixed(cmd, "policy", "internet", "none")
	fixed(cmd, "accel", "auto", "kvm", "tcg")
	must(cmd.MarkFlagDirname("dir"))
	must(cmd.RegisterFlagCompletionFunc("image", a.completeImages))
	return cmd
}

// request turns the flags into what the gateway is asked for.
func (f createFlags) request(name string) (api.CreateRequest, error) {
	req := f.CreateRequest
	req.Name = name
	if (req.Image == "") == (req.Dir == "") {
		return req, usagef("see: helix create --help", "create %q: give either --image or --dir", name)
	}
	if req.Dir != "" {
		abs, err := filepath.Abs(req.Dir)
		if err != nil {
			return req, fmt.Errorf("create %q: folder %q: %w", name, req.Dir, err)
		}
		req.Dir = abs
	}
	if req.CPUs < 0 {
		return req, usagef("", "create %q: --cpus %d is negative", name, req.CPUs)
	}
	if err := oneOf("--policy", req.Policy, "internet", "none"); err != nil {
		return req, err
	}
	if err := oneOf("--accel", req.Accel, "auto", "kvm", "tcg"); err != nil {
		return req, err
	}
	var err error
	if req.MemoryMB, err = parseMemory(f.memory); err != nil {
		return req, err
	}
	for _, text := range f.services {
		s, err := parseService(text)
		if err != nil {
			return req, err
		}
		req.Services = append(req.Services, s)
	}
	return req, nil
}

func oneOf(flag, value string, allowed ...string) error {
	if value == "" || slices.Contains(allowed, value) {
		return nil
	}
	return usagef("", "%s %q is none of %s", flag, value, strings.Join(allowed, ", "))
}

// parseMemory reads a size in MiB or GiB; "" is 0, the default.
func parseMemory(text string) (int, error) {
	if text == "" {
		return 0, nil
	}
	number := strings.TrimSuffix(strings.TrimSuffix(strings.ToUpper(text), "B"), "I")
	factor := 0
	if digits, ok := strings.CutSuffix(number, "M"); ok {
		number, factor = digits, 1
	} else if digits, ok := strings.CutSuffix(number, "G"); ok {
		number, factor = digits, 1024
	}
	n, err := strconv.ParseUint(number, 10, 31)
	if factor == 0 || err != nil || n == 0 || n > uint64(math.MaxInt32/factor) {
		return 0, usagef("write it as 512M or 2G", "--memory %q is not a size", text)
	}
	return int(n) * factor, nil
}

// parseService reads NAME=PORT[/PROTO].
func parseService(text string) (api.Service, error) {
	name, rest, ok := strings.Cut(text, "=")
	digits, protocol, named := strings.Cut(rest, "/")
	port, err := strconv.ParseUint(digits, 10, 16)
	if !ok || name == "" || err != nil || port == 0 || (named && protocol == "") {
		return api.Service{}, usagef("write it as NAME=PORT or NAME=PORT/PROTO, for example app=5173", "--service %q is not a service", text)
	}
	if err := oneOf("protocol of --service "+name+":", protocol, "http", "https", "h2c", "tls", "tcp"); err != nil {
		return api.Service{}, err
	}
	return api.Service{Name: name, Port: uint16(port), Protocol: protocol}, nil
}

func (a *app) create(ctx context.Context, name string, f createFlags) error {
	req, err := f.request(name)
	if err != nil {
		return err
	}
	return a.withClient(func(c *api.Client) error {
		o := &outlook{doing: fmt.Sprintf("create %q", name), until: stateRunning}
		act := func(ctx context.Context) (api.Workspace, error) { return c.Create(ctx, req) }
		ws, err := a.reach(ctx, c, name, f.noWait || f.NoStart, o, act)
		if err != nil {
			return err
		}
		return a.printReached(ws)
	})
}

// printReached prints where a workspace has got to, and what to type next.
func (a *app) printReached(ws api.Workspace) error {
	if a.json {
		return a.printJSON(ws)
	}
	t := active(ws)
	text := fmt.Sprintf("%s is %s", ws.Name, stateText(t))
	switch t.State {
	case stateRunning:
		text = fmt.Sprintf("%s is ready\n\n  helix ssh %s\n  %s", ws.Name, ws.Name, ws.URL)
	case stateStopped:
		text += "; start it: helix start " + ws.Name
	}
	_, err := fmt.Fprintln(a.stdout, clean(text))
	return err
}

func (a *app) lifecycleCommands() []*cobra.Command {
	type verb struct {
		name, short string
		until       string
		do          func(*api.Client, context.Context, string) (api.Workspace, error)
	}
	var cmds []*cobra.Command
	for _, v := range []verb{
		{"start", "Start a workspace", stateRunning, (*api.Client).Start},
		{"stop", "Stop a workspace; its files stay", stateStopped, (*api.Client).Stop},
		{"restart", "Stop a workspace and start it again", stateRunning, (*api.Client).Restart},
	} {
		var noWait bool
		cmd := &cobra.Command{
			Use: v.name + " NAME", Short: v.short, Args: exactly("NAME"), ValidArgsFunction: a.completeNames,
			RunE: func(cmd *cobra.Command, args []string) error {
				return a.withClient(func(c *api.Client) error {
					name := args[0]
					o := &outlook{doing: fmt.Sprintf("%s %q", v.name, name), until: v.until, again: v.name == "restart"}
					act := func(ctx context.Context) (api.Workspace, error) { return v.do(c, ctx, name) }
					ws, err := a.reach(cmd.Context(), c, name, noWait, o, act)
					if err != nil {
						return err
					}
					return a.printReached(ws)
				})
			},
		}
		cmd.Flags().BoolVar(&noWait, "no-wait", false, "do not wait until it is done")
		cmds = append(cmds, cmd)
	}
	return cmds
}

// reach asks for a change and, unless told not to, waits for its end.
func (a *app) reach(ctx context.Context, c *api.Client, name string, noWait bool, o *outlook, act func(context.Context) (api.Workspace, error)) (api.Workspace, error) {
	if noWait {
		ws, err := act(ctx)
		return ws, doing(o.doing, err)
	}
	return a.follow(ctx, c, name, o, act)
}

func (a *app) rmCommand() *cobra.Command {
	return &cobra.Command{
		Use: "rm NAME...", Short: "Remove workspaces, running or not",
		Long: `Remove workspaces, running or not, without asking. The files of a virtual
machine are removed with it; the folder of a folder workspace stays.`,
		Args: atLeast("NAME"), ValidArgsFunction: a.completeMoreNames,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withClient(func(c *api.Client) error {
				var errs []error
				for _, name := range args {
					if err := c.Remove(cmd.Context(), name); err != nil {
						errs = append(errs, interrupted(cmd.Context(), fmt.Errorf("remove %q: %w", name, err), fmt.Sprintf("remove %q", name), "see what is left: helix ls"))
						if cmd.Context().Err() != nil {
							break
						}
						continue
					}
					if _, err := fmt.Fprintf(a.stdout, "%s is removed\n", name); err != nil {
						return err
					}
				}
				return errors.Join(errs...)
			})
		},
	}
}
