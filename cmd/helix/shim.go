package main

import (
	"github.com/spf13/cobra"

	"helix.local/helix/vmctl"
)

func (a *app) shimCommand() *cobra.Command {
	return &cobra.Command{
		Use: "vmshim PLAN", Short: "Own one virtual machine", Hidden: true, Args: exactly("PLAN"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return vmctl.RunShim(cmd.Context(), args[0], vmctl.ShimConfig{})
		},
	}
}
