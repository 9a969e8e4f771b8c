package gateway

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"helix.local/helix/agent/wire"
	"helix.local/helix/gateway/api"
	"helix.local/helix/vmctl"
	"helix.local/helix/workspaces"
)

// recover brings what an earlier gateway left to an end or goes on with it. The
// registry says what was meant; only a shim that answers for the same machine
// and start says what is.
func (g *Gateway) recover(ctx context.Context, held []*keeper) {
	for i, k := range held {
		g.relisten(ctx, k.name)
		if !g.spawn(func(ctx context.Context) {
			defer k.give()
			k.resume(ctx)
		}) {
			release(held[i:])
			return
		}
	}
	g.strangers(ctx)
}

// hold takes the turn of every workspace, before anybody can ask for one.
func (g *Gateway) hold() []*keeper {
	var held []*keeper
	for _, ws := range g.registry.List() {
		k := g.keep(ws.Name)
		<-k.turn // nobody else knows the keeper yet
		held = append(held, k)
	}
	return held
}

func release(held []*keeper) {
	for _, k := range held {
		k.give()
	}
}

// strangers tells of virtual machines that no record knows. A removal deletes
// the record last, so this is what a registry that was lost, or an older copy of
// it, leaves: somebody's disks. Nothing is done to them.
func (g *Gateway) strangers(ctx context.Context) {
	entries, err := os.ReadDir(g.path("vm"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		g.log.WarnContext(ctx, "virtual machines not looked through", "err", err)
	}
	known := map[string]bool{}
	for _, ws := range g.registry.List() {
		known[ws.Name] = true
	}
	for _, broken := range g.registry.Broken() {
		known[broken.Name] = true
	}
	for _, e := range entries {
		if !known[e.Name()] {
			g.warn(ctx, api.Warning{
				Message: fmt.Sprintf("%s holds a virtual machine that the registry does not know; it is left as it is", g.vmDir(e.Name())),
				Hint:    "bring the registry back from a copy, or remove the folder once nothing runs in it",
			})
		}
	}
}

// resume takes up one workspace. The turn is held.
func (k *keeper) resume(ctx context.Context) {
	ws, err := k.g.registry.Get(k.name)
	if err != nil {
		return // it was never more than a name
	}
	t := ws.ActiveTarget()
	if t.State == workspaces.Deleting {
		if err := k.remove(ctx, ws.ID); err != nil {
			k.g.log.WarnContext(ctx, "removal not finished", "workspace", k.name, "err", err)
		}
		return
	}
	switch t.Kind {
	case workspaces.KindDir:
		k.resumeDir(ctx, t)
	case workspaces.KindVM:
		k.resumeVM(ctx, ws, t)
	case workspaces.KindHost: // joins by itself
	}
}

// resumeDir starts a directory target that was meant to run: its agent ended
// with the gateway that started it.
func (k *keeper) resumeDir(ctx context.Context, t workspaces.Target) {
	if err := k.settle(ctx); err != nil {
		k.g.log.WarnContext(ctx, "state not settled", "workspace", k.name, "err", err)
		return
	}
	if t.Desired != workspaces.DesiredRunning {
		return
	}
	s, err := k.prepare(ctx)
	if err != nil {
		k.refused(ctx, err)
		return
	}
	if s != nil {
		k.start(ctx, *s)
	}
}

// refused records a start that did not even begin. The turn is held.
func (k *keeper) refused(ctx context.Context, err error) {
	ws, gerr := k.g.registry.Get(k.name)
	if gerr != nil {
		return // removed meanwhile: there is nothing to record it on
	}
	t := ws.ActiveTarget()
	k.move(ctx, t, workspaces.Move{To: workspaces.Starting, Stage: workspaces.StagePrepare})
	k.move(ctx, t, workspaces.Move{To: workspaces.Failed, Reason: err.Error(), Hint: hintOf(err)})
}

// adoptTime is how long a shim may take to say what it owns.
const adoptTime = 10 * time.Second

// resumeVM adopts the machine if its shim still answers, and records its end otherwise.
func (k *keeper) resumeVM(ctx context.Context, ws workspaces.Workspace, t workspaces.Target) {
	asking, cancel := context.WithTimeout(ctx, adoptTime)
	vm, err := vmctl.Adopt(asking, k.g.vmDir(ws.Name), t.VM.UUID, t.Generation)
	cancel()
	switch {
	case err == nil:
	case ctx.Err() != nil:
		return // this gateway goes down; the machine is the next one's
	case errors.Is(err, vmctl.ErrNotRunning), errors.Is(err, vmctl.ErrOtherMachine):
		k.lost(ctx, ws, t, err)
		return
	default:
		// It may run well and only not answer. Nothing is done to it until a
		// person says stop, start or rm.
		k.g.log.ErrorContext(ctx, "virtual machine not adopted", "workspace", k.name, "err", err)
		k.move(ctx, t, workspaces.Move{
			To: workspaces.Unknown, Reason: fmt.Sprintf("its shim does not answer: %v", err), Hint: "helix restart " + k.name,
		})
		return
	}
	run := &vmRunner{g: k.g, vm: vm, dir: k.g.vmDir(ws.Name)}
	k.g.log.InfoContext(ctx, "virtual machine adopted", "workspace", k.name, "state", string(t.State))
	switch t.State {
	case workspaces.Starting:
		prepared, err := k.g.prepareVM(ctx, ws, t)
		if err != nil {
			k.refuseAdopted(ctx, t, run, err)
			return
		}
		// The secret is in the guest or spent already; this gateway never sees it.
		s := prepared(ws, t, wire.Secret(""))
		k.attempt(ctx, s, func(context.Context, *instance) (runner, error) { return run, nil })
	case workspaces.Running, workspaces.Unknown:
		k.takeUp(ctx, t, run)
	case workspaces.Stopping, workspaces.Stopped, workspaces.Failed, workspaces.Deleting:
		inst := newInstance(k.name, t.Name, t.ID, t.Generation, k.g.log)
		k.setLive(inst)
		k.attach(ctx, inst, run)
		if err := k.halt(ctx); err != nil {
			k.g.log.ErrorContext(ctx, "stop not finished", "workspace", k.name, "err", err)
		}
	}
}

func (k *keeper) refuseAdopted(ctx context.Context, t workspaces.Target, run runner, err error) {
	err = errors.Join(err, run.kill(ctx))
	k.move(ctx, t, workspaces.Move{To: workspaces.Failed, Reason: err.Error(), Hint: hintOf(err)})
}

// takeUp goes on with a machine that runs. It was ready once, so the router may
// use it as soon as its agent is back.
func (k *keeper) takeUp(ctx context.Context, t workspaces.Target, run runner) {
	inst := newInstance(k.name, t.Name, t.ID, t.Generation, k.g.log)
	inst.setUp() // before the first session, so that it gets its identity
	k.setLive(inst)
	k.attach(ctx, inst, run)
	k.g.spawn(func(ctx context.Context) { k.awaitAgent(ctx, t, inst) })
}

// awaitAgent says "unknown" of an adopted machine whose agent does not come back
// in time, and "running" once it does.
func (k *keeper) awaitAgent(ctx context.Context, t workspaces.Target, inst *instance) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	state := t.State
	late := time.NewTimer(vmBoot)
	defer late.Stop()
	for {
		sessions, changed := inst.watch()
		if len(sessions) > 0 {
			if state == workspaces.Unknown {
				k.move(ctx, t, workspaces.Move{To: workspaces.Running, Generation: t.Generation})
			}
			return
		}
		select {
		case <-changed:
		case <-late.C:
			state = workspaces.Unknown
			k.move(ctx, t, workspaces.Move{
				To: state, Reason: "the virtual machine runs, but its agent has not come back", Hint: "helix logs " + k.name, Generation: t.Generation,
			})
		case <-inst.ended:
			return
		case <-ctx.Done():
			return
		}
	}
}

// lost records that a machine that should be there is not, and removes its remains.
func (k *keeper) lost(ctx context.Context, ws workspaces.Workspace, t workspaces.Target, err error) {
	clean := vmctl.Clean
	if errors.Is(err, vmctl.ErrOtherMachine) { // of a start that the registry has given up
		clean = func(dir string) error { return k.g.cleanVM(ctx, dir) }
	}
	reason := "it ended while no gateway ran"
	if exit, err := vmctl.ReadExit(k.g.vmDir(ws.Name)); err == nil && exit.UUID == t.VM.UUID && exit.Generation == t.Generation {
		reason += ": " + fate(exit).Error()
	}
	if err := clean(k.g.vmDir(ws.Name)); err != nil {
		reason += "; " + err.Error()
	}
	switch t.State {
	case workspaces.Starting, workspaces.Running, workspaces.Unknown:
		k.move(ctx, t, workspaces.Move{To: workspaces.Failed, Reason: reason, Hint: "helix start " + k.name})
	case workspaces.Stopping:
		k.move(ctx, t, workspaces.Move{To: workspaces.Stopped, Reason: reason})
	case workspaces.Stopped, workspaces.Failed, workspaces.Deleting: // as it should be
	}
}
