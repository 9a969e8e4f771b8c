package main

import (
	"fmt"
	"runtime"

	"github.com/spf13/cobra"

	"helix.local/helix/gateway/api"
)

// version is set by the linker: -X main.version=...
var version = "0.1.0-dev"

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version", Args: atMost(0),
		RunE: func(*cobra.Command, []string) error {
			if a.json {
				return a.printJSON(map[string]string{
					"version": version, "go": runtime.Version(), "os": runtime.GOOS, "arch": runtime.GOARCH,
				})
			}
			_, err := fmt.Fprintf(a.stdout, "helix %s (%s, %s/%s)\n", version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
			return err
		},
	}
}

func (a *app) caCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ca", Short: "Print the path of the CA certificate that HTTPS clients trust", Args: atMost(0),
		Example: `  curl --cacert "$(helix ca)" https://demo.helix.local`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withClient(func(c *api.Client) error {
				info, err := c.Info(cmd.Context())
				if err != nil {
					return fmt.Errorf("find the CA certificate: %w", err)
				}
				if a.json {
					return a.printJSON(map[string]string{"ca_certificate": info.Root})
				}
				a.notef("nothing trusts it unless told to; for one call: curl --cacert \"$(helix ca)\" https://NAME.%s\n", info.Zone)
				_, err = fmt.Fprintln(a.stdout, info.Root)
				return err
			})
		},
	}
}
