package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"helix.local/helix/gateway/api"
)

func (a *app) vmCommand() *cobra.Command {
	vm := &cobra.Command{Use: "vm", Short: "Look into virtual machines"}
	group(vm)
	vm.AddCommand(&cobra.Command{
		Use: "plan NAME", Short: "Print the launch plan of a virtual machine, as JSON",
		Args: exactly("NAME"), ValidArgsFunction: a.completeNames,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withClient(func(c *api.Client) error {
				plan, err := c.Plan(cmd.Context(), args[0])
				if err != nil {
					return fmt.Errorf("plan of %q: %w", args[0], err)
				}
				var text bytes.Buffer
				if err := json.Indent(&text, plan, "", "  "); err != nil {
					return fmt.Errorf("plan of %q: %w", args[0], err)
				}
				text.WriteByte('\n')
				_, err = text.WriteTo(a.stdout)
				return err
			})
		},
	})
	return vm
}

func (a *app) imageCommand() *cobra.Command {
	image := &cobra.Command{Use: "image", Short: "Build, list and remove images of virtual machines"}
	group(image)
	image.AddCommand(
		&cobra.Command{
			Use: "build NAME", Short: "Build a stock image, for example tiny", Args: exactly("NAME"),
			RunE: func(cmd *cobra.Command, args []string) error { return a.buildImage(cmd.Context(), args[0]) },
		},
		&cobra.Command{
			Use: "ls", Aliases: []string{"list"}, Short: "List the images", Args: atMost(0),
			RunE: func(cmd *cobra.Command, _ []string) error {
				return a.withClient(func(c *api.Client) error {
					all, err := c.Images(cmd.Context())
					if err != nil {
						return fmt.Errorf("list images: %w", err)
					}
					if a.json {
						return printList(a, all)
					}
					rows := make([][]string, len(all))
					for i, m := range all {
						rows[i] = []string{m.Name, byteSize(m.Size), stamp(m.Created), m.Kernel, strings.Join(m.Used, " "), m.Digest}
					}
					return a.printTable([]string{"NAME", "SIZE", "CREATED", "KERNEL", "USED BY", "DIGEST"}, rows)
				})
			},
		},
		&cobra.Command{
			Use: "rm NAME...", Short: "Remove images that no workspace uses",
			Args: atLeast("NAME"), ValidArgsFunction: a.completeImages,
			RunE: func(cmd *cobra.Command, args []string) error {
				return a.withClient(func(c *api.Client) error {
					var errs []error
					for _, name := range args {
						if err := c.RemoveImage(cmd.Context(), name); err != nil {
							errs = append(errs, fmt.Errorf("remove image %q: %w", name, err))
						} else if _, err := fmt.Fprintf(a.stdout, "image %s is removed\n", name); err != nil {
							return err
						}
					}
					return errors.Join(errs...)
				})
			},
		})
	return image
}

func (a *app) buildImage(ctx context.Context, name string) error {
	return a.withClient(func(c *api.Client) error {
		view := a.newProgress(ctx)
		defer view.close()
		step, since := "", time.Now()
		turn := func(next string, ok bool) {
			if step != "" {
				view.end(step, time.Since(since), ok)
			}
			if step, since = next, time.Now(); next != "" {
				view.begin(next)
			}
		}
		image, err := c.BuildImage(ctx, name, func(p api.BuildProgress) {
			if next := clean(p.Step); next != "" && next != step {
				turn(next, true)
			}
			view.amount(p.Done, p.Total)
			if p.Message != "" {
				view.note("  " + clean(p.Message))
			}
		})
		turn("", err == nil)
		view.close()
		if err != nil {
			what := fmt.Sprintf("build image %q", name)
			return interrupted(ctx, doing(what, err), what, "nothing is left of it; build it again when you like")
		}
		if a.json {
			return a.printJSON(image)
		}
		_, err = fmt.Fprintf(a.stdout, "image %s is built: %s, %s\n\n  helix create box --image %s\n", clean(image.Name), byteSize(image.Size), clean(image.Digest), clean(image.Name))
		return err
	})
}

func (a *app) keyCommand() *cobra.Command {
	key := &cobra.Command{Use: "key", Short: "Say whose SSH keys may log in to the workspaces"}
	group(key)
	key.AddCommand(
		&cobra.Command{
			Use: "add (FILE | LINE | -)", Short: "Let the holder of a public key log in",
			Example: "  helix key add ~/.ssh/id_ed25519.pub\n  ssh-add -L | helix key add -",
			Args:    atLeast("FILE"),
			RunE:    func(cmd *cobra.Command, args []string) error { return a.addKeys(cmd.Context(), args) },
		},
		&cobra.Command{
			Use: "ls", Aliases: []string{"list"}, Short: "List the keys", Args: atMost(0),
			RunE: func(cmd *cobra.Command, _ []string) error {
				return a.withClient(func(c *api.Client) error {
					keys, err := c.Keys(cmd.Context())
					if err != nil {
						return fmt.Errorf("list keys: %w", err)
					}
					if a.json {
						return printList(a, keys)
					}
					rows := make([][]string, len(keys))
					for i, k := range keys {
						rows[i] = []string{k.Fingerprint, k.Type, k.Comment}
					}
					return a.printTable([]string{"FINGERPRINT", "TYPE", "COMMENT"}, rows)
				})
			},
		},
		&cobra.Command{
			Use: "rm KEY", Short: "Take a key's access away; name it by fingerprint, its beginning, or the comment",
			Args: exactly("KEY"),
			RunE: func(cmd *cobra.Command, args []string) error {
				return a.withClient(func(c *api.Client) error {
					gone, err := c.RemoveKey(cmd.Context(), args[0])
					if err != nil {
						return fmt.Errorf("remove key %q: %w", args[0], err)
					}
					_, err = fmt.Fprintf(a.stdout, "key %s is removed\n", keyText(gone))
					return err
				})
			},
		})
	return key
}

func keyText(k api.Key) string {
	return clean(strings.TrimSpace(k.Fingerprint + " " + k.Comment))
}

// maxKeyFile bounds what is read in search of public keys.
const maxKeyFile = 1 << 20

// keyLines reads the keys that args name: one file, "-" for standard input, or
// the words of a key itself.
func (a *app) keyLines(args []string) ([]string, error) {
	text := strings.Join(args, " ")
	if len(args) == 1 && (args[0] == "-" || !strings.Contains(args[0], " ")) {
		from := a.stdin
		if args[0] != "-" {
			f, err := os.Open(args[0])
			if errors.Is(err, fs.ErrNotExist) {
				return nil, &api.Error{Code: api.CodeNotFound, Message: fmt.Sprintf("add key: no file %s", args[0]), Cure: "name a file with a public key, such as ~/.ssh/id_ed25519.pub"}
			}
			if err != nil {
				return nil, fmt.Errorf("add key: %w", err)
			}
			defer f.Close()
			from = f
		}
		read, err := io.ReadAll(io.LimitReader(from, maxKeyFile))
		if err != nil {
			return nil, fmt.Errorf("add key: read %s: %w", args[0], err)
		}
		text = string(read)
	}
	if strings.Contains(text, "PRIVATE KEY") { // it goes nowhere, also not to the gateway
		return nil, usagef("give the public key: the file beside it that ends in .pub", "add key: this is a private key")
	}
	var lines []string
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
			lines = append(lines, line)
		}
	}
	if len(lines) == 0 {
		return nil, usagef("name a file with a public key, such as ~/.ssh/id_ed25519.pub", "add key: no key in %s", strings.Join(args, " "))
	}
	return lines, nil
}

func (a *app) addKeys(ctx context.Context, args []string) error {
	lines, err := a.keyLines(args)
	if err != nil {
		return err
	}
	return a.withClient(func(c *api.Client) error {
		for _, line := range lines {
			k, err := c.AddKey(ctx, line)
			if err != nil {
				return fmt.Errorf("add key: %w", err)
			}
			if _, err := fmt.Fprintf(a.stdout, "key %s may log in\n", keyText(k)); err != nil {
				return err
			}
		}
		return nil
	})
}
