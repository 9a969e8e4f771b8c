package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/google/uuid"

	"helix.local/helix/agent/wire"
	"helix.local/helix/gateway/api"
	"helix.local/helix/tunnel"
	"helix.local/helix/vmctl"
	"helix.local/helix/vmctl/guestnet"
	"helix.local/helix/workspaces"
)

// serialRetry is the pause before the control link is dialled again.
const serialRetry = 100 * time.Millisecond

// vmRunner is a virtual machine under its shim. It outlives the gateway.
type vmRunner struct {
	g   *Gateway
	vm  *vmctl.VM
	dir string
}

func (g *Gateway) vmDir(name string) string { return g.path("vm", name) }

// machine describes the virtual machine of a target to vmctl.
func (g *Gateway) machine(ctx context.Context, ws workspaces.Workspace, t workspaces.Target) (vmctl.Machine, error) {
	img, err := g.images.Get(ctx, t.VM.Image)
	if err != nil {
		return vmctl.Machine{}, err
	}
	return vmctl.Machine{
		Name: ws.Name, UUID: t.VM.UUID, Generation: t.Generation, Image: img,
		CPUs: t.VM.CPUs, MemoryMB: t.VM.MemoryMB, DiskGB: t.VM.DiskGB,
		RunDir: g.vmDir(ws.Name), LinkSocket: g.path("links.sock"),
		Policy: guestnet.Policy(t.VM.Policy), Accel: vmctl.Accel(t.VM.Accel),
	}, nil
}

// plannable says what makes a start of such a machine impossible on this host,
// before there is a workspace of it.
func (g *Gateway) plannable(ctx context.Context, name string, spec workspaces.VMSpec) error {
	if workspaces.CheckName(name) != nil || spec.Policy != "" && spec.Policy != workspaces.PolicyInternet && spec.Policy != workspaces.PolicyNone ||
		spec.Accel != "" && spec.Accel != "auto" && spec.Accel != workspaces.AccelKVM && spec.Accel != workspaces.AccelTCG {
		return nil // the registry says it better
	}
	if spec.Accel == "auto" {
		spec.Accel = ""
	}
	spec.UUID = uuid.NewString()
	_, err := g.plan(ctx, workspaces.Workspace{Name: name}, workspaces.Target{VM: &spec})
	if err != nil {
		return asInvalid(err)
	}
	return nil
}

// plan is the launch plan of a target as it would be started now.
func (g *Gateway) plan(ctx context.Context, ws workspaces.Workspace, t workspaces.Target) (vmctl.Plan, error) {
	m, err := g.machine(ctx, ws, t)
	if err != nil {
		return vmctl.Plan{}, err
	}
	host, err := g.probe(ctx)
	if err != nil {
		return vmctl.Plan{}, err
	}
	return vmctl.NewPlan(m, host)
}

// Plan implements api.Backend.
func (b backend) Plan(ctx context.Context, name string) (api.Plan, error) {
	ws, err := b.registry.Get(name)
	if err != nil {
		return nil, err
	}
	t := ws.ActiveTarget()
	if t.VM == nil {
		return nil, invalid("workspace %q is a folder: it has no launch plan", name)
	}
	plan, err := b.plan(ctx, ws, t)
	if err != nil {
		return nil, err
	}
	return json.MarshalIndent(plan, "", "  ")
}

func (g *Gateway) prepareVM(ctx context.Context, ws workspaces.Workspace, t workspaces.Target) (prepared, error) {
	plan, err := g.plan(ctx, ws, t) // for its faults and its times; the start makes its own
	if err != nil {
		return nil, err
	}
	g.warnPlan(ctx, plan)
	if plan.Image != t.VM.ImageDigest {
		g.warn(ctx, api.Warning{
			Message: fmt.Sprintf("image %q is another one than when workspace %q was created; this start uses what it is now", t.VM.Image, ws.Name),
		})
	}
	slow := slowdown(plan)
	return func(ws workspaces.Workspace, t workspaces.Target, token wire.Secret) starting {
		return starting{
			ws: ws, target: t, boot: vmBoot * slow, health: vmHealth * slow,
			launch: func(ctx context.Context, _ *instance) (runner, error) { return g.launchVM(ctx, ws, t, token) },
		}
	}, nil
}

func (g *Gateway) launchVM(ctx context.Context, ws workspaces.Workspace, t workspaces.Target, token wire.Secret) (runner, error) {
	boot, err := json.Marshal(wire.Boot{
		Version: wire.Version, Workspace: ws.Name, Zone: g.zones[0], Target: t.ID, Generation: t.Generation,
		Token: token, GatewayKey: g.publicKey(), Dir: "/workspace",
		Link: net.JoinHostPort(guestnet.GatewayAddr, fmt.Sprint(guestnet.LinkPort)),
	})
	if err != nil {
		return nil, fmt.Errorf("describe the target to its agent: %w", err)
	}
	plan, err := g.plan(ctx, ws, t)
	if err != nil {
		return nil, err
	}
	k := g.keep(ws.Name)
	vm, err := vmctl.Start(ctx, plan, vmctl.StartConfig{
		Helix: g.cfg.Helix, Boot: boot, Log: g.log,
		Progress: func(e vmctl.StepEvent) {
			if e.Done {
				return
			}
			k.move(ctx, t, workspaces.Move{To: workspaces.Starting, Stage: workspaces.Stage(e.Step), Generation: t.Generation})
		},
	})
	if err != nil {
		return nil, err
	}
	return &vmRunner{g: g, vm: vm, dir: g.vmDir(ws.Name)}, nil
}

// tend keeps the control link over the serial port; the fast link is dialled
// by the guest.
func (r *vmRunner) tend(ctx context.Context, inst *instance) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var link sync.WaitGroup
	defer link.Wait()
	link.Go(func() {
		for ctx.Err() == nil {
			if err := r.serial(ctx); err != nil {
				inst.log.DebugContext(ctx, "control link", "err", err)
			}
			pause(ctx, serialRetry)
		}
	})
	for ctx.Err() == nil {
		exit, err := r.vm.Wait(ctx)
		if err == nil {
			inst.end(fate(exit))
			cancel()
		} else if ctx.Err() == nil {
			inst.log.ErrorContext(ctx, "virtual machine not watched", "err", err)
			pause(ctx, time.Second)
		}
	}
}

// serial makes one session of the serial port and serves it until it ends.
func (r *vmRunner) serial(ctx context.Context) error {
	raw, err := r.vm.DialSerial(ctx)
	if err != nil {
		return err
	}
	conn, err := tunnel.OpenSerialGateway(ctx, raw)
	if err != nil {
		return errors.Join(err, ignoreClosed(raw.Close()))
	}
	return r.g.admit(ctx, conn, wire.LinkSerial)
}

// fate says how the machine ended.
func fate(exit vmctl.Exit) error {
	text := string(exit.Reason)
	if exit.Detail != "" {
		text += ": " + exit.Detail
	}
	if exit.State == vmctl.Exited || exit.Reason == vmctl.ExitGuestShutdown {
		return fmt.Errorf("%w (%s)", errOrderly, text)
	}
	return fmt.Errorf("the virtual machine ended: %s", text)
}

func (r *vmRunner) stop(ctx context.Context, inst *instance) error {
	_, err := r.vm.Stop(ctx, vmctl.StopConfig{
		AgentShutdown: func(ctx context.Context) error {
			return inst.call(ctx, http.MethodPost, wire.PathShutdown, nil, nil)
		},
	})
	return errors.Join(err, vmctl.Clean(r.dir))
}

func (r *vmRunner) kill(ctx context.Context) error {
	_, err := r.vm.Kill(ctx)
	return errors.Join(err, vmctl.Clean(r.dir))
}

// cleanVM ends what may still run in a workspace's run folder, and removes what
// it left there. The disk and the logs stay.
func (g *Gateway) cleanVM(ctx context.Context, dir string) error {
	if !exists(dir) {
		return nil
	}
	return errors.Join(vmctl.Kill(ctx, dir), vmctl.Clean(dir))
}

// The times of a virtual machine with hardware acceleration, from QEMU's start
// to the agent's first word, and from there to level 2.
const (
	vmBoot   = 30 * time.Second
	vmHealth = 20 * time.Second
)

// slowdown is what these times are multiplied by.
func slowdown(p vmctl.Plan) time.Duration {
	if p.Accel == "tcg" {
		return 4
	}
	return 1
}

// warnPlan passes the plan's warning on, once for each text.
func (g *Gateway) warnPlan(ctx context.Context, p vmctl.Plan) {
	g.mu.Lock()
	known := p.Warning == "" || slices.ContainsFunc(g.warnings, func(w api.Warning) bool { return w.Message == p.Warning })
	g.mu.Unlock()
	if !known {
		g.warn(ctx, api.Warning{Message: p.Warning})
	}
}

// probeLife is how long a look at this machine is good for: somebody may
// install QEMU or join a group while the gateway runs.
const probeLife = time.Minute

// probe looks at this machine, at most once in probeLife.
func (g *Gateway) probe(ctx context.Context) (vmctl.Host, error) {
	g.probeMu.Lock()
	defer g.probeMu.Unlock()
	if g.probed.QEMU != "" && time.Since(g.probedAt) < probeLife {
		return g.probed, nil
	}
	host, err := vmctl.ProbeHost(ctx, vmctl.ProbeConfig{})
	if err != nil {
		return host, err
	}
	g.probed, g.probedAt = host, time.Now()
	return host, nil
}

// startError is a failed start with the last lines of the console.
type startError struct {
	err   error
	lines []string
}

func (e *startError) Unwrap() error { return e.err }
func (e *startError) Hint() string  { return hintOf(e.err) }
func (e *startError) Error() string {
	if len(e.lines) == 0 {
		return e.err.Error()
	}
	return e.err.Error() + "\n  " + strings.Join(e.lines, "\n  ")
}

// consoleLines is how much of the console a failed start shows.
const consoleLines = 8

// explain adds what the console said last to the error of a failed start.
func (g *Gateway) explain(name string, err error) error {
	if step, ok := errors.AsType[*vmctl.StepError](err); ok && len(step.Lines) > 0 {
		return &startError{err, tail(step.Lines)}
	}
	ws, gerr := g.registry.Get(name)
	if gerr != nil {
		return err
	}
	var lines []string
	for line := range strings.Lines(lastLines(g.consoleOf(ws), consoleLines)) {
		lines = append(lines, strings.Map(printable, strings.TrimSpace(line)))
	}
	return &startError{err, lines}
}

// printable drops what a guest could use to write on somebody's terminal.
func printable(r rune) rune {
	if unicode.IsPrint(r) {
		return r
	}
	return -1
}

func tail(lines []string) []string { return lines[max(0, len(lines)-consoleLines):] }
