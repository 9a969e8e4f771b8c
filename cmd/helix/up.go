package main

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/user"
	"path/filepath"
	"runtime"
	"time"

	"github.com/spf13/cobra"

	"helix.local/helix/gateway"
	"helix.local/helix/gateway/api"
)

type upFlags struct {
	network   string
	zone      string
	ports     string
	agent     string
	grace     time.Duration
	logLevel  string
	logFormat string
}

func (a *app) upCommand() *cobra.Command {
	var f upFlags
	cmd := &cobra.Command{
		Use: "up", Short: "Run the gateway, in the foreground", Args: atMost(0),
		Long: `Run the gateway until SIGTERM or Ctrl-C; then it takes no more connections and
gives the open ones the grace time. A second signal ends it at once. Virtual
machines go on without it, and the next "helix up" takes them over.

Under systemd (Type=notify) it says when it is ready and when it stops.`,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.up(cmd.Context(), f) },
	}
	flags := cmd.Flags()
	flags.StringVar(&f.network, "range", "127.88.0.0/16", "loopback `network`: workspaces get addresses from its lower half, programs of directory workspaces (HELIX_ADDR) from its upper half")
	flags.StringVar(&f.zone, "zone", "helix.local", "`zone` of the names")
	flags.StringVar(&f.ports, "ports", string(gateway.PortsAuto), "privileged (22, 53, 80, 443), high (10022, 10053, 10080, 10443), or auto: high where the first cannot be had")
	flags.StringVar(&f.agent, "agent", "", "`path` of the helix-agent program (default: beside helix)")
	flags.DurationVar(&f.grace, "grace", 10*time.Second, "`time` that open connections get at the end")
	flags.StringVar(&f.logLevel, "log-level", "info", "debug, info, warn or error")
	flags.StringVar(&f.logFormat, "log-format", "text", "text or json")
	fixed(cmd, "ports", string(gateway.PortsAuto), string(gateway.PortsPrivileged), string(gateway.PortsHigh))
	fixed(cmd, "log-level", "debug", "info", "warn", "error")
	fixed(cmd, "log-format", "text", "json")
	return cmd
}

// config is what the flags ask of the gateway.
func (f upFlags) config(state, helix string) (gateway.Config, error) {
	cfg := gateway.Config{
		State: state, Zone: f.zone, Ports: gateway.Ports(f.ports), Helix: helix, Agent: f.agent, Version: version, Grace: f.grace,
	}
	if err := oneOf("--ports", f.ports, string(gateway.PortsAuto), string(gateway.PortsPrivileged), string(gateway.PortsHigh)); err != nil {
		return cfg, err
	}
	network, err := netip.ParsePrefix(f.network)
	if err != nil || network != network.Masked() {
		return cfg, usagef("write it as 127.88.0.0/16", "--range %q is no network", f.network)
	}
	cfg.Range = network
	if f.grace <= 0 {
		return cfg, usagef("", "--grace %s is not a time to wait", f.grace)
	}
	if cfg.Agent == "" {
		name := "helix-agent"
		if runtime.GOOS == "windows" {
			name += ".exe"
		}
		cfg.Agent = filepath.Join(filepath.Dir(helix), name)
	}
	if cfg.Agent, err = filepath.Abs(cfg.Agent); err != nil {
		return cfg, fmt.Errorf("find the agent %q: %w", f.agent, err)
	}
	return cfg, nil
}

// logger writes to standard error as the flags ask.
func (a *app) logger(f upFlags) (*slog.Logger, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(f.logLevel)); err != nil {
		return nil, usagef("", "--log-level %q is none of debug, info, warn, error", f.logLevel)
	}
	options := &slog.HandlerOptions{Level: level}
	switch f.logFormat {
	case "text":
		return slog.New(slog.NewTextHandler(a.stderr, options)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(a.stderr, options)), nil
	}
	return nil, usagef("", "--log-format %q is neither text nor json", f.logFormat)
}

func (a *app) up(ctx context.Context, f upFlags) error {
	state, err := a.state()
	if err != nil {
		return err
	}
	helix, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	cfg, err := f.config(state, helix)
	if err != nil {
		return err
	}
	if cfg.Log, err = a.logger(f); err != nil {
		return err
	}
	cfg.Home = a.invokerHome(cfg.Log)
	tell := func(state string) {
		if err := notify(a.getenv("NOTIFY_SOCKET"), state); err != nil {
			cfg.Log.WarnContext(ctx, "service manager not told", "state", state, "err", err)
		}
	}
	cfg.Ready = func() {
		a.announce(ctx, state)
		tell("READY=1")
	}
	gw, err := gateway.New(cfg)
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { tell("STOPPING=1") })
	defer stop()
	return gw.Run(ctx)
}

// invokerHome is the home folder of the person who runs helix, also under sudo:
// the keys that lie there may log in.
func (a *app) invokerHome(log *slog.Logger) string {
	if name := a.getenv("SUDO_USER"); name != "" && os.Geteuid() == 0 {
		u, err := user.Lookup(name)
		if err == nil {
			return u.HomeDir
		}
		log.Warn("sudo's user not found", "user", name, "err", err)
	}
	home, err := os.UserHomeDir()
	if err != nil {
		log.Warn("no home folder: no default keys", "err", err)
		return ""
	}
	return home
}

// announce tells a person that the gateway is up, and what to type next.
func (a *app) announce(ctx context.Context, state string) {
	c := api.NewClient(filepath.Join(state, "api.sock"))
	defer c.Close()
	info, err := c.Info(ctx)
	if err != nil {
		a.notef("helix: the gateway listens, but does not answer: %v\n", err)
		return
	}
	flag := ""
	if a.stateFlag != "" {
		flag = " --state " + quote(a.stateFlag)
	}
	a.notef("helix %s is up: names in %s, answered at %s\nnext: helix create demo --dir .%s\n", info.Version, info.Zone, info.DNS, flag)
}
