package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"helix.local/helix/gateway/api"
)

// stateText is a target's state, with the stage of a start.
func stateText(t api.Target) string {
	if t.State == stateStarting && t.Stage != "" {
		return t.State + " (" + t.Stage + ")"
	}
	return t.State
}

func (a *app) lsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List the workspaces", Args: atMost(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withClient(func(c *api.Client) error {
				all, err := c.Workspaces(cmd.Context())
				if err != nil {
					return fmt.Errorf("list workspaces: %w", err)
				}
				if a.json {
					return printList(a, all)
				}
				if len(all) == 0 {
					a.notef("no workspaces yet; make one: helix create demo --dir .\n")
				}
				rows := make([][]string, len(all))
				for i, ws := range all {
					rows[i] = listRow(ws)
				}
				return a.printTable([]string{"NAME", "TARGET", "STATE", "ADDRESS", "URL"}, rows)
			})
		},
	}
}

func listRow(ws api.Workspace) []string {
	if ws.Broken != "" {
		return []string{ws.Name, "", "broken", ws.Address, ws.Broken}
	}
	t := active(ws)
	return []string{ws.Name, t.Kind, stateText(t), ws.Address, ws.URL}
}

func (a *app) statusCommand() *cobra.Command {
	return &cobra.Command{
		Use: "status [NAME]", Short: "Show a workspace, or the gateway itself", Args: atMost(1), ValidArgsFunction: a.completeNames,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withClient(func(c *api.Client) error {
				if len(args) == 0 {
					info, err := c.Info(cmd.Context())
					if err != nil {
						return fmt.Errorf("status of the gateway: %w", err)
					}
					return a.printInfo(info)
				}
				ws, err := c.Workspace(cmd.Context(), args[0])
				if err != nil {
					return fmt.Errorf("status of %q: %w", args[0], err)
				}
				return a.printWorkspace(ws)
			})
		},
	}
}

// field is one line of a description; an empty value leaves it out.
type field struct{ name, value string }

func (a *app) printFields(fields []field) error {
	for _, f := range fields {
		if f.value == "" {
			continue
		}
		value := strings.ReplaceAll(clean(f.value), "\n", "\n"+strings.Repeat(" ", 14))
		if _, err := fmt.Fprintf(a.stdout, "%-12s  %s\n", f.name, value); err != nil {
			return err
		}
	}
	return nil
}

func (a *app) printInfo(info api.Info) error {
	if a.json {
		return a.printJSON(info)
	}
	fields := []field{
		{"version", info.Version},
		{"process", strconv.Itoa(info.PID)},
		{"state", info.State},
		{"started", stamp(info.Started)},
		{"zones", strings.Join(info.Zones, " ")},
		{"address", info.Address},
		{"dns", info.DNS},
		{"jump host", info.SSH},
		{"ports", fmt.Sprintf("ssh %d, http %d, https %d on every workspace address", info.SSHPort, info.HTTP, info.HTTPS)},
		{"certificate", info.Root},
	}
	for _, w := range info.Warnings {
		text := w.Message
		if w.Hint != "" {
			text += "\nhint: " + w.Hint
		}
		fields = append(fields, field{"warning", text})
	}
	return a.printFields(fields)
}

func (a *app) printWorkspace(ws api.Workspace) error {
	if a.json {
		return a.printJSON(ws)
	}
	if ws.Broken != "" {
		return a.printFields([]field{{"name", ws.Name}, {"broken", ws.Broken}})
	}
	fields := []field{
		{"name", ws.Name}, {"hostname", ws.Hostname}, {"address", ws.Address}, {"url", ws.URL}, {"created", stamp(ws.Created)},
	}
	for _, t := range ws.Targets {
		name := t.Name + ", " + t.Kind
		if t.Name == ws.Active {
			name += ", active"
		}
		fields = append(fields, field{"target", name}, field{"  state", stateText(t) + since(t.Since)},
			field{"  reason", t.Reason}, field{"  hint", t.Hint}, field{"  folder", t.Dir}, field{"  image", t.Image},
			field{"  size", machineSize(t)}, field{"  network", t.Policy}, field{"  agent", agentText(t)})
	}
	for _, s := range ws.Services {
		fields = append(fields, field{"service", fmt.Sprintf("%s = %d, %s", s.Name, s.Port, s.Protocol)})
	}
	for _, p := range ws.Ports {
		text := fmt.Sprintf("%d on %s", p.Port, p.Address)
		if p.Process != "" {
			text += " by " + p.Process
		}
		fields = append(fields, field{"port", text})
	}
	return a.printFields(fields)
}

func stamp(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.Local().Format("2006-01-02 15:04:05")
}

func since(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return " since " + stamp(t)
}

func machineSize(t api.Target) string {
	if t.CPUs == 0 && t.MemoryMB == 0 {
		return ""
	}
	return fmt.Sprintf("%d CPUs, %s", t.CPUs, byteSize(int64(t.MemoryMB)<<20))
}

func agentText(t api.Target) string {
	if t.Agent == "" {
		return "not connected"
	}
	return t.Agent + " over " + strings.Join(t.Links, ", ")
}

func (a *app) portsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ports NAME", Short: "List the ports that programs in a workspace listen on",
		Args: exactly("NAME"), ValidArgsFunction: a.completeNames,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withClient(func(c *api.Client) error {
				ws, err := c.Workspace(cmd.Context(), args[0])
				if err != nil {
					return fmt.Errorf("ports of %q: %w", args[0], err)
				}
				if a.json {
					return printList(a, ws.Ports)
				}
				rows := make([][]string, len(ws.Ports))
				for i, p := range ws.Ports {
					rows[i] = []string{strconv.Itoa(int(p.Port)), p.Address, p.Process, p.URL}
				}
				return a.printTable([]string{"PORT", "ADDRESS", "PROCESS", "URL"}, rows)
			})
		},
	}
}

func (a *app) logsCommand() *cobra.Command {
	var follow bool
	var lines int
	cmd := &cobra.Command{
		Use: "logs NAME", Short: "Show the console of a workspace",
		Args: exactly("NAME"), ValidArgsFunction: a.completeNames,
		RunE: func(cmd *cobra.Command, args []string) error {
			if lines < 0 {
				return usagef("", "--lines %d is negative", lines)
			}
			var w io.Writer = a.stdout
			if s, ok := w.(*sink); ok && isTerminal(s.w) {
				w = &cleanWriter{w: w}
			}
			return a.withClient(func(c *api.Client) error {
				err := c.Logs(cmd.Context(), args[0], lines, follow, w)
				return a.watchEnd(cmd.Context(), doing(fmt.Sprintf("logs of %q", args[0]), err))
			})
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on with what comes")
	cmd.Flags().IntVarP(&lines, "lines", "n", 0, "begin with the last `N` lines (0: all)")
	return cmd
}

// watchEnd is the error of a watch that only its user ends: to have ended it is
// a success, but the exit code tells the signal.
func (a *app) watchEnd(ctx context.Context, err error) error {
	if cause, ok := context.Cause(ctx).(signalError); ok {
		return &exitError{code: exitSignal + int(cause.signal)}
	}
	return err
}

func (a *app) eventsCommand() *cobra.Command {
	var after int64
	cmd := &cobra.Command{
		Use: "events [NAME]", Short: "Watch what changes, of one workspace or all",
		Args: atMost(1), ValidArgsFunction: a.completeNames,
		Long: `Watch what changes until Ctrl-C: a line an event, with --json a document a line.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			from, name := api.New, ""
			if after >= 0 {
				from = uint64(after)
			} else if cmd.Flags().Changed("after") {
				return usagef("", "--after %d is negative", after)
			}
			if len(args) == 1 {
				name = args[0]
			}
			return a.withClient(func(c *api.Client) error {
				if name != "" { // of a name that is none, nothing would ever come
					if _, err := c.Workspace(cmd.Context(), name); err != nil {
						return doing("watch events", err)
					}
				}
				err := c.Events(cmd.Context(), from, name, nil, a.printEvent)
				return a.watchEnd(cmd.Context(), doing("watch events", err))
			})
		},
	}
	cmd.Flags().Int64Var(&after, "after", -1, "begin with what is stored after event `N` (0: all that is stored)")
	cmd.Flags().BoolP("follow", "f", true, "watch; events have no other way, the flag is there to match logs")
	return cmd
}

func (a *app) printEvent(e api.Event) error {
	if a.json {
		if err := json.NewEncoder(a.stdout).Encode(e); err != nil {
			return fmt.Errorf("print event: %w", err)
		}
		return nil
	}
	_, err := fmt.Fprintln(a.stdout, clean(eventLine(e)))
	return err
}

func eventLine(e api.Event) string {
	words := []string{strconv.FormatUint(e.Seq, 10), e.Time.Local().Format("15:04:05.000")}
	for _, word := range []string{e.Workspace, e.Kind, e.State, e.Stage} {
		if word != "" {
			words = append(words, word)
		}
	}
	line := strings.Join(words, " ")
	if e.Message != "" {
		line += ": " + e.Message
	}
	if e.Hint != "" {
		line += " (hint: " + e.Hint + ")"
	}
	return line
}
