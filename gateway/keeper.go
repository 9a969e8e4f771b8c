package gateway

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"helix.local/helix/agent/wire"
	"helix.local/helix/workspaces"
)

// The causes that end a start before it is through.
var (
	errAborted = errors.New("stopped while it was starting")
	errDown    = errors.New("the gateway was stopped during the start")
)

// A runner is the live thing behind a target: a VM under its shim, or a child
// process.
type runner interface {
	// tend keeps the links to the agent until ctx ends, and tells inst when
	// the target has ended. It returns when either has happened.
	tend(ctx context.Context, inst *instance)
	// stop ends it in good order, and by force when that takes too long.
	stop(ctx context.Context, inst *instance) error
	// kill ends it at once and removes what it left behind.
	kill(ctx context.Context) error
}

// A keeper looks after one workspace. It does one thing at a time: whoever
// holds the turn starts, stops or removes. An instance lives from its start to
// its end and is looked after by goroutines that Run of the gateway owns.
type keeper struct {
	g    *Gateway
	name string
	turn chan struct{} // holds one token while nobody does anything
	gone bool          // the workspace was removed; whoever holds the turn may look

	mu    sync.Mutex
	abort context.CancelCauseFunc // ends the start under way; nil when there is none
	asked bool                    // somebody waits to stop it: the next start ends at once
	live  *instance               // nil while nothing runs
	run   runner                  // of live
	stop  context.CancelFunc      // ends live's goroutines
	done  chan struct{}           // closed when they have ended
}

func newKeeper(g *Gateway, name string) *keeper {
	k := &keeper{g: g, name: name, turn: make(chan struct{}, 1)}
	k.turn <- struct{}{}
	return k
}

// ErrBusy reports that the workspace is in the middle of something else.
var ErrBusy = errors.New("busy")

// take waits for the turn until ctx ends. It reports false for a keeper whose
// workspace is gone: the name may have another one.
func (k *keeper) take(ctx context.Context) (bool, error) {
	select {
	case <-k.turn:
	case <-ctx.Done():
		return false, fmt.Errorf("wait for workspace %q: %w", k.name, context.Cause(ctx))
	}
	if k.gone {
		k.give()
		return false, nil
	}
	return true, nil
}

// acquire takes the turn of the keeper that a name has.
func (g *Gateway) acquire(ctx context.Context, name string) (*keeper, error) {
	for {
		k := g.keep(name)
		switch ok, err := k.take(ctx); {
		case err != nil:
			return nil, err
		case ok:
			return k, nil
		}
	}
}

// acquireToStop is acquire for who wants the workspace to end: it does not wait
// for a start to get through.
func (g *Gateway) acquireToStop(ctx context.Context, name string) (*keeper, error) {
	k := g.keep(name)
	k.interrupt(errAborted)
	got, err := g.acquire(ctx, name)
	for _, asked := range []*keeper{k, got} { // nobody waits any more, also who gave up
		if asked != nil {
			asked.mu.Lock()
			asked.asked = false
			asked.mu.Unlock()
		}
	}
	return got, err
}

func (k *keeper) give() { k.turn <- struct{}{} }

func (k *keeper) instance() *instance {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.live
}

// interrupt ends a start that is under way.
func (k *keeper) interrupt(cause error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.abort != nil {
		k.abort(cause)
	} else {
		k.asked = true
	}
}

// patience is how long a start waits for what the workspace is doing. The end
// of a removal takes no longer; a start, a stop or a restart is worth an error.
const patience = time.Second

// begin starts a workspace's active target in an owned goroutine. The registry
// says "starting", or "failed" with the reason, when it returns.
func (g *Gateway) begin(ctx context.Context, name string) error {
	waiting, cancel := context.WithTimeout(ctx, patience)
	k, err := g.acquire(waiting, name)
	cancel()
	if err != nil {
		return fmt.Errorf("start %q: %w: it is starting, stopping or being removed", name, ErrBusy)
	}
	s, err := k.prepare(ctx)
	if err != nil {
		k.refused(ctx, err)
	}
	if err != nil || s == nil {
		k.give()
		return err
	}
	if !g.spawn(func(ctx context.Context) {
		defer k.give()
		k.start(ctx, *s)
	}) {
		k.give()
		return errDown
	}
	return nil
}

// prepared goes on with a start once the registry has begun it.
type prepared func(workspaces.Workspace, workspaces.Target, wire.Secret) starting

// prepareTarget checks what can be checked before a start.
func (g *Gateway) prepareTarget(ctx context.Context, ws workspaces.Workspace, t workspaces.Target) (prepared, error) {
	switch t.Kind {
	case workspaces.KindDir:
		return g.prepareDir(ws, t)
	case workspaces.KindVM:
		return g.prepareVM(ctx, ws, t)
	case workspaces.KindHost:
	}
	return nil, invalid("target %q of kind %s cannot be started from here", t.Name, t.Kind)
}

// A starting target: what prepare found and start needs.
type starting struct {
	ws     workspaces.Workspace
	target workspaces.Target
	launch func(ctx context.Context, inst *instance) (runner, error)
	boot   time.Duration // allowance from the launch to the agent's first word
	health time.Duration // and from there to level 2
}

// prepare checks what can be checked without starting anything and moves the
// target to Starting. It returns nil when the target runs already.
func (k *keeper) prepare(ctx context.Context) (*starting, error) {
	ws, err := k.g.registry.Get(k.name)
	if err != nil {
		return nil, err
	}
	target := ws.ActiveTarget()
	if target.State == workspaces.Running && k.instance() != nil {
		return nil, nil
	}
	prepared, err := k.g.prepareTarget(ctx, ws, target)
	if err != nil {
		return nil, err
	}
	if _, err := k.g.registry.SetDesired(k.name, target.Name, workspaces.DesiredRunning); err != nil {
		return nil, err
	}
	token := newToken()
	ws, err = k.g.registry.BeginStart(k.name, target.Name, workspaces.Start{
		TokenHash: workspaces.HashToken(string(token)), Expires: time.Now().Add(tokenLife), Stage: workspaces.StagePrepare,
	})
	if err != nil {
		return nil, err
	}
	s := prepared(ws, ws.ActiveTarget(), token)
	return &s, nil
}

// stage tells the registry how far the start is.
func (k *keeper) stage(ctx context.Context, s starting, stage workspaces.Stage) {
	k.move(ctx, s.target, workspaces.Move{To: workspaces.Starting, Stage: stage, Generation: s.target.Generation})
}

// move changes the target's state. A refused move is logged: the state in the
// registry is then newer than what this goroutine knows.
func (k *keeper) move(ctx context.Context, t workspaces.Target, m workspaces.Move) {
	if _, err := k.g.registry.SetState(k.name, t.Name, m); err != nil {
		k.g.log.WarnContext(ctx, "state not changed", "workspace", k.name, "to", string(m.To), "err", err)
	}
}

// start takes the target from Starting to Running, or to Failed (Stopped when a
// person stopped it) with nothing left behind. The turn is held.
func (k *keeper) start(ctx context.Context, s starting) {
	k.attempt(ctx, s, s.launch)
}

// attempt is start with another way to get the runner: resume finds one that
// an earlier gateway launched.
func (k *keeper) attempt(ctx context.Context, s starting, launch func(context.Context, *instance) (runner, error)) {
	ctx, abort := context.WithCancelCause(ctx)
	defer abort(nil)
	k.mu.Lock()
	k.abort = abort
	if k.asked {
		abort(errAborted)
	}
	k.mu.Unlock()
	defer func() {
		k.mu.Lock()
		k.abort = nil
		k.mu.Unlock()
	}()

	inst := newInstance(k.name, s.target.Name, s.target.ID, s.target.Generation, k.g.log)
	k.setLive(inst)
	run, err := launch(ctx, inst)
	if err == nil {
		k.attach(ctx, inst, run)
		err = k.untilReady(ctx, s, inst)
	}
	if err == nil {
		inst.setUp()
		k.move(ctx, s.target, workspaces.Move{To: workspaces.Running, Generation: s.target.Generation})
		inst.log.InfoContext(ctx, "workspace running")
		k.g.relisten(ctx, k.name)
		return
	}
	err = k.g.explain(k.name, err)
	clean := context.WithoutCancel(ctx)
	if run != nil {
		if kerr := run.kill(clean); kerr != nil {
			inst.log.ErrorContext(clean, "failed start not taken back", "err", kerr)
		}
	}
	k.detach()
	k.failed(clean, s.target, context.Cause(ctx), err)
}

// failed records how a start ended that did not end well.
func (k *keeper) failed(ctx context.Context, t workspaces.Target, cause, err error) {
	if errors.Is(cause, errAborted) {
		k.move(ctx, t, workspaces.Move{To: workspaces.Stopping, Generation: t.Generation})
		k.move(ctx, t, workspaces.Move{To: workspaces.Stopped, Reason: errAborted.Error(), Generation: t.Generation})
		return
	}
	if errors.Is(cause, context.Canceled) {
		err = errDown
	}
	k.g.log.WarnContext(ctx, "start failed", "workspace", k.name, "err", err)
	k.move(ctx, t, workspaces.Move{
		To: workspaces.Failed, Reason: err.Error(), Hint: hintOf(err), Generation: t.Generation,
	})
}

func hintOf(err error) string {
	if hinted, ok := errors.AsType[interface {
		error
		Hint() string
	}](err); ok {
		return hinted.Hint()
	}
	return ""
}

// untilReady waits for both levels of readiness, each with its own time.
func (k *keeper) untilReady(ctx context.Context, s starting, inst *instance) error {
	k.stage(ctx, s, workspaces.StageBoot)
	if err := within(ctx, s.boot, "the agent did not come up", inst.await); err != nil {
		return err
	}
	k.stage(ctx, s, workspaces.StageHealth)
	return within(ctx, s.health, "the agent did not get healthy", func(ctx context.Context) error {
		if err := k.g.identify(ctx, inst); err != nil {
			return err
		}
		return inst.awaitHealth(ctx)
	})
}

// within runs f with a deadline of its own, which has a name.
func within(ctx context.Context, d time.Duration, late string, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, d, fmt.Errorf("%s within %s", late, d.Round(time.Second)))
	defer cancel()
	return f(ctx)
}

func (k *keeper) setLive(inst *instance) {
	k.mu.Lock()
	k.live = inst
	k.mu.Unlock()
	k.g.instances.Store(inst.id, inst)
}

// attach starts what looks after a launched target: its port watch, and the
// wait for its end.
func (k *keeper) attach(ctx context.Context, inst *instance, run runner) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan struct{})
	k.mu.Lock()
	k.run, k.stop, k.done = run, cancel, done
	k.mu.Unlock()
	if !k.g.spawn(func(g context.Context) {
		defer close(done)
		release := context.AfterFunc(g, cancel)
		defer release()
		var work sync.WaitGroup
		defer work.Wait()
		work.Go(func() { inst.watchPorts(ctx, func() { k.g.relisten(ctx, k.name) }) })
		work.Go(func() { run.tend(ctx, inst) })
		work.Go(func() { k.g.keepIdentity(ctx, inst) })
		select {
		case <-inst.ended:
			k.g.spawn(func(ctx context.Context) { k.died(ctx, inst) })
		case <-ctx.Done():
		}
		cancel()
	}) {
		cancel()
		close(done)
	}
}

// detach ends what attach started and forgets the instance. The turn is held.
func (k *keeper) detach() {
	k.mu.Lock()
	inst, stop, done := k.live, k.stop, k.done
	k.live, k.run, k.stop, k.done = nil, nil, nil, nil
	k.mu.Unlock()
	if inst == nil {
		return
	}
	inst.end(errors.New("it was stopped"))
	k.g.instances.Delete(inst.id)
	if stop != nil {
		stop()
		<-done
	}
}

// died deals with a target that ended by itself.
func (k *keeper) died(ctx context.Context, inst *instance) {
	if ok, err := k.take(ctx); err != nil || !ok {
		return // the gateway goes down, and the next one finds out; or it was removed
	}
	defer k.give()
	if k.instance() != inst {
		return // somebody stopped it, or a start took it back
	}
	k.mu.Lock()
	run := k.run
	k.mu.Unlock()
	why := inst.err()
	if err := run.kill(ctx); err != nil {
		inst.log.ErrorContext(ctx, "ended target left something behind", "err", err)
	}
	k.detach()
	t := workspaces.Target{Name: inst.target, Generation: inst.generation}
	if errors.Is(why, errOrderly) {
		k.move(ctx, t, workspaces.Move{To: workspaces.Stopping, Generation: t.Generation})
		k.move(ctx, t, workspaces.Move{To: workspaces.Stopped, Reason: why.Error(), Generation: t.Generation})
	} else {
		k.move(ctx, t, workspaces.Move{
			To: workspaces.Failed, Reason: why.Error(), Hint: "helix start " + k.name, Generation: t.Generation,
		})
	}
	k.g.log.WarnContext(ctx, "workspace ended by itself", slog.String("workspace", k.name), "err", why)
	k.g.relisten(ctx, k.name)
}

// errOrderly marks the end of a target that shut itself down.
var errOrderly = errors.New("it shut itself down")

// halt stops the target from whatever it is doing. The turn is held.
func (k *keeper) halt(ctx context.Context) error {
	k.mu.Lock()
	inst, run := k.live, k.run
	k.mu.Unlock()
	if inst == nil || run == nil {
		if err := k.g.cleanVM(ctx, k.g.vmDir(k.name)); err != nil { // one that could not be adopted
			return fmt.Errorf("stop %q: %w", k.name, err)
		}
		return k.settle(ctx)
	}
	t := workspaces.Target{Name: inst.target, Generation: inst.generation}
	k.move(ctx, t, workspaces.Move{To: workspaces.Stopping})
	err := run.stop(ctx, inst)
	k.detach()
	k.g.relisten(ctx, k.name)
	if err != nil {
		k.move(ctx, t, workspaces.Move{To: workspaces.Failed, Reason: err.Error(), Hint: hintOf(err)})
		return fmt.Errorf("stop %q: %w", k.name, err)
	}
	k.move(ctx, t, workspaces.Move{To: workspaces.Stopped})
	return nil
}

// settle brings a target that does not run to Stopped.
func (k *keeper) settle(ctx context.Context) error {
	ws, err := k.g.registry.Get(k.name)
	if err != nil {
		return err
	}
	if t := ws.ActiveTarget(); t.State != workspaces.Stopped {
		k.move(ctx, t, workspaces.Move{To: workspaces.Stopping})
		k.move(ctx, t, workspaces.Move{To: workspaces.Stopped})
	}
	return nil
}

// remove ends the target by force and deletes the workspace. The turn is held.
// Afterwards the keeper is gone: a new workspace of the name gets its own.
func (k *keeper) remove(ctx context.Context, id string) error {
	ws, err := k.g.registry.Get(k.name)
	if err == nil && ws.ID != id {
		return fmt.Errorf("remove %q: %w: it was removed, and made anew", k.name, workspaces.ErrNotFound)
	}
	if err != nil {
		return err
	}
	t := ws.ActiveTarget()
	k.move(ctx, t, workspaces.Move{To: workspaces.Deleting})
	k.mu.Lock()
	run := k.run
	k.mu.Unlock()
	if run != nil {
		if err := run.kill(ctx); err != nil {
			return fmt.Errorf("remove %q: %w", k.name, err)
		}
	}
	k.detach()
	return k.forget(ctx)
}

// forget deletes the record and what else there is of a workspace that does not
// run. The turn is held.
func (k *keeper) forget(ctx context.Context) error {
	if err := k.g.erase(ctx, k.name); err != nil {
		return fmt.Errorf("remove %q: %w", k.name, err)
	}
	if err := k.g.registry.Delete(k.name); err != nil {
		return err
	}
	k.gone = true
	k.g.keepers.Delete(k.name)
	return k.g.forgetHost(k.name)
}
