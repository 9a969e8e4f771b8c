package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"helix.local/helix/gateway/api"
	"helix.local/helix/sshd"
)

func (a *app) sshCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "ssh [USER@]NAME [SSH-ARGUMENT...] [-- COMMAND]", Short: "Open a shell in a workspace with the system's ssh",
		Long: `Open a shell in a workspace, or run a command in it, with the system's ssh. What
stands after the name goes to ssh as it is.`,
		Example: `  helix ssh demo
  helix ssh root@demo -L 8080:localhost:80
  helix ssh demo -- 'cd /workspace && make'`,
		Args: atLeast("NAME"), ValidArgsFunction: a.completeNames,
		RunE: func(cmd *cobra.Command, args []string) error {
			path, argv, err := a.sshArguments(cmd, args)
			if err != nil {
				return &exitError{exitConnection, err}
			}
			return a.become(path, argv)
		},
	}
	cmd.Flags().SetInterspersed(false)
	return cmd
}

func (a *app) sshArguments(cmd *cobra.Command, args []string) (path string, argv []string, err error) {
	user, name, named := strings.Cut(args[0], "@")
	if !named {
		user, name = "", args[0]
	}
	if path, err = exec.LookPath("ssh"); err != nil {
		return "", nil, &hintError{fmt.Errorf("ssh to %q: no ssh on this machine: %w", name, err), "install it (Debian: apt install openssh-client), or use: helix exec " + name + " -- COMMAND"}
	}
	err = a.withClient(func(c *api.Client) error {
		ws, err := c.Workspace(cmd.Context(), name)
		if err != nil {
			return fmt.Errorf("ssh to %q: %w", name, err)
		}
		access, err := c.SSH(cmd.Context())
		if err != nil {
			return fmt.Errorf("ssh to %q: %w", name, err)
		}
		host := ws.Hostname
		if host == "" {
			return fmt.Errorf("ssh to %q: its record is broken: %s", name, ws.Broken)
		}
		if named {
			host = user + "@" + host
		}
		argv = append([]string{"ssh", "-F", access.ConfigFile, host}, args[1:]...)
		return nil
	})
	return path, argv, err
}

func (a *app) sshConfigCommand() *cobra.Command {
	var install, uninstall bool
	cmd := &cobra.Command{
		Use: "ssh-config", Short: "Print the ssh configuration for the workspaces, or install it", Args: atMost(0),
		Long: `Print an ssh configuration with which ssh, scp, rsync, git and editors reach every
workspace by name. --install adds one Include line to ~/.ssh/config that points to
it, --uninstall takes that line away again.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if install && uninstall {
				return usagef("", "give one of --install and --uninstall")
			}
			if uninstall { // also when the gateway is gone for good
				state, err := a.state()
				if err != nil {
					return err
				}
				return a.changeSSHConfig(filepath.Join(state, "ssh", "config"), sshd.Uninstall)
			}
			return a.withClient(func(c *api.Client) error {
				access, err := c.SSH(cmd.Context())
				if err != nil {
					return fmt.Errorf("ssh configuration: %w", err)
				}
				if install {
					return a.changeSSHConfig(access.ConfigFile, sshd.Install)
				}
				if a.json {
					return a.printJSON(access)
				}
				_, err = fmt.Fprint(a.stdout, access.Config)
				return err
			})
		},
	}
	cmd.Flags().BoolVar(&install, "install", false, "add one Include line to ~/.ssh/config")
	cmd.Flags().BoolVar(&uninstall, "uninstall", false, "take the Include line away")
	return cmd
}

// changeSSHConfig edits the user's own configuration. When that cannot be done,
// the person gets the line and the reason; nothing is lost by it.
func (a *app) changeSSHConfig(generated string, edit func(user, generated string) (sshd.Change, error)) error {
	home, err := os.UserHomeDir()
	if err != nil {
		return fmt.Errorf("find ~/.ssh/config: %w", err)
	}
	path := filepath.Join(home, ".ssh", "config")
	change, err := edit(path, generated)
	text := ""
	switch change {
	case sshd.Changed:
		text = path + " is changed"
	case sshd.Unchanged:
		text = path + " is as it should be; nothing to do"
	case sshd.ByHand:
		a.notef("helix: %s cannot be changed: %v\nhint: this is the line at its top; edit it by hand\n", path, err)
		text, err = sshd.IncludeLine(generated), nil
	}
	if err != nil {
		return fmt.Errorf("change %s: %w", path, err)
	}
	_, err = fmt.Fprintln(a.stdout, text)
	return err
}
