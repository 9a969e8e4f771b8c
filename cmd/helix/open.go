package main

import (
	"context"
	"fmt"
	"net/url"
	"os/exec"
	"runtime"
	"strconv"

	"github.com/spf13/cobra"

	"helix.local/helix/gateway/api"
)

func (a *app) openCommand() *cobra.Command {
	var onlyPrint bool
	cmd := &cobra.Command{
		Use: "open NAME [PORT|SERVICE]", Short: "Print the URL of a workspace and open it in the browser",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return missing(cmd, "NAME")
			}
			return atMost(2)(cmd, args)
		},
		ValidArgsFunction: a.completeOpen,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withClient(func(c *api.Client) error {
				ws, err := c.Workspace(cmd.Context(), args[0])
				if err != nil {
					return fmt.Errorf("open %q: %w", args[0], err)
				}
				which := ""
				if len(args) == 2 {
					which = args[1]
				}
				address, web, err := serviceURL(ws, which)
				if err != nil {
					return err
				}
				if _, err := fmt.Fprintln(a.stdout, address); err != nil {
					return err
				}
				if onlyPrint || !web {
					return nil
				}
				return a.browse(cmd.Context(), address)
			})
		},
	}
	cmd.Flags().BoolVar(&onlyPrint, "print", false, "only print the URL")
	return cmd
}

// serviceURL is where a port or a named service of ws is found, and whether a
// browser can show it. which is "" for the main web service.
func serviceURL(ws api.Workspace, which string) (address string, web bool, err error) {
	main, err := url.Parse(ws.URL)
	if err != nil || main.Host == "" {
		return "", false, fmt.Errorf("open %q: %q is no URL", ws.Name, ws.URL)
	}
	if which == "" {
		return ws.URL, true, nil
	}
	port, err := strconv.ParseUint(which, 10, 16)
	number := err == nil && port != 0
	var names []string
	for _, s := range ws.Services {
		names = append(names, s.Name)
		if s.Name != which && !(number && uint64(s.Port) == port) {
			continue
		}
		if s.Protocol == "tcp" {
			return fmt.Sprintf("%s:%d", ws.Hostname, s.Port), false, nil
		}
		number = true
	}
	if !number {
		return "", false, &api.Error{
			Code:    api.CodeNotFound,
			Message: fmt.Sprintf("open %q: it has no service %q", ws.Name, which),
			Cure:    nearestHint(which, names),
		}
	}
	main.Host = which + "." + main.Host
	return main.String(), true, nil
}

// browse opens address where there is a desktop to open it on.
func (a *app) browse(ctx context.Context, address string) error {
	argv := opener(runtime.GOOS, a.getenv)
	if argv == nil {
		return nil
	}
	path, err := exec.LookPath(argv[0])
	if err != nil {
		return nil // no opener, no desktop; the URL is printed
	}
	cmd := exec.CommandContext(ctx, path, append(argv[1:], address)...)
	cmd.Stderr = a.stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("open %s with %s: %w", address, argv[0], err)
	}
	return nil
}

// opener is the command that opens a URL, nil without a desktop.
func opener(system string, getenv func(string) string) []string {
	switch system {
	case "darwin":
		return []string{"open"}
	case "windows":
		return []string{"rundll32", "url.dll,FileProtocolHandler"}
	}
	if getenv("DISPLAY") == "" && getenv("WAYLAND_DISPLAY") == "" {
		return nil
	}
	return []string{"xdg-open"}
}

func (a *app) completeOpen(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	if len(args) == 0 {
		return a.completeNames(cmd, args, prefix)
	}
	return a.candidates(cmd, func(ctx context.Context, c *api.Client) ([]string, error) {
		if len(args) > 1 {
			return nil, nil
		}
		ws, err := c.Workspace(ctx, args[0])
		var found []string
		for _, s := range ws.Services {
			found = append(found, s.Name)
		}
		for _, p := range ws.Ports {
			found = append(found, strconv.Itoa(int(p.Port)))
		}
		return found, err
	})
}
