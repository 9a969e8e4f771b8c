package main

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"helix.local/helix/gateway/api"
)

// exactly wants one argument for each name.
func exactly(names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) < len(names) {
			return missing(cmd, names[len(args)])
		}
		if len(args) > len(names) {
			return surplus(cmd, args[len(names)])
		}
		return nil
	}
}

// atLeast wants name once or more.
func atLeast(name string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return missing(cmd, name)
		}
		return nil
	}
}

// atMost wants up to n arguments.
func atMost(n int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) > n {
			return surplus(cmd, args[n])
		}
		return nil
	}
}

func missing(cmd *cobra.Command, name string) error {
	return usagef("usage: "+cmd.UseLine(), "%s: %s is missing", commandName(cmd), name)
}

// commandName is the command without "helix" before it.
func commandName(cmd *cobra.Command) string {
	return strings.TrimPrefix(cmd.CommandPath(), cmd.Root().Name()+" ")
}

func surplus(cmd *cobra.Command, arg string) error {
	return usagef("usage: "+cmd.UseLine(), "%s: %q is one argument too many", commandName(cmd), arg)
}

// must is for calls that fail only when a flag is misspelt in this program.
func must(err error) {
	if err != nil {
		panic(err)
	}
}

// fixed completes a flag with fixed values.
func fixed(cmd *cobra.Command, flag string, values ...string) {
	must(cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)))
}

// completionTime bounds how long a press of the tab key may take.
const completionTime = time.Second

// candidates asks the gateway for completions. Without an answer there are
// none: a shell has no place for errors while a person types.
func (a *app) candidates(cmd *cobra.Command, list func(context.Context, *api.Client) ([]string, error)) ([]string, cobra.ShellCompDirective) {
	parent := cmd.Context()
	if parent == nil {
		parent = cmd.Root().Context() // completion hands over a command that was never executed
	}
	ctx, cancel := context.WithTimeout(parent, completionTime)
	defer cancel()
	var found []string
	err := a.withClient(func(c *api.Client) error {
		var err error
		found, err = list(ctx, c)
		return err
	})
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return found, cobra.ShellCompDirectiveNoFileComp
}

// completeNames completes the first argument with workspace names.
func (a *app) completeNames(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return a.completeMoreNames(cmd, args, prefix)
}

// completeMoreNames completes every argument with workspace names that are not
// there yet.
func (a *app) completeMoreNames(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	return a.candidates(cmd, func(ctx context.Context, c *api.Client) ([]string, error) {
		all, err := c.Workspaces(ctx)
		var names []string
		for _, ws := range all {
			if strings.HasPrefix(ws.Name, prefix) && !slices.Contains(args, ws.Name) {
				names = append(names, cobra.CompletionWithDesc(ws.Name, stateText(active(ws))))
			}
		}
		return names, err
	})
}

// completeImages completes with names of stored images.
func (a *app) completeImages(cmd *cobra.Command, _ []string, prefix string) ([]string, cobra.ShellCompDirective) {
	return a.candidates(cmd, func(ctx context.Context, c *api.Client) ([]string, error) {
		all, err := c.Images(ctx)
		var names []string
		for _, image := range all {
			if strings.HasPrefix(image.Name, prefix) {
				names = append(names, image.Name)
			}
		}
		return names, err
	})
}
