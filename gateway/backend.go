package gateway

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"helix.local/helix/gateway/api"
	"helix.local/helix/vmctl/image"
	"helix.local/helix/workspaces"
)

// backend is the gateway as its API sees it.
type backend struct{ *Gateway }

// An invalidError reports a request that is wrong in itself.
type invalidError struct{ text, cure string }

func (e *invalidError) Error() string  { return e.text }
func (e *invalidError) Hint() string   { return e.cure }
func (e *invalidError) Code() api.Code { return api.CodeInvalid }

// A codedError is an error that the API sorts otherwise than by its kind.
type codedError struct {
	error
	code api.Code
}

func (e *codedError) Unwrap() error  { return e.error }
func (e *codedError) Hint() string   { return hintOf(e.error) }
func (e *codedError) Code() api.Code { return e.code }

func invalid(format string, args ...any) error {
	return &invalidError{text: fmt.Sprintf(format, args...)}
}

// Code implements api.Backend.
func (b backend) Code(err error) api.Code {
	if coded, ok := errors.AsType[interface {
		error
		Code() api.Code
	}](err); ok {
		return coded.Code()
	}
	if _, ok := errors.AsType[*workspaces.InvalidError](err); ok {
		return api.CodeInvalid
	}
	if _, ok := errors.AsType[*workspaces.NameError](err); ok {
		return api.CodeInvalid
	}
	if _, ok := errors.AsType[*image.UnknownError](err); ok {
		return api.CodeNotFound
	}
	if _, ok := errors.AsType[*image.RecipeError](err); ok && errors.Is(err, image.ErrNoRecipe) {
		return api.CodeNotFound
	}
	if _, ok := errors.AsType[*image.InUseError](err); ok {
		return api.CodeConflict
	}
	if _, ok := errors.AsType[*Unreachable](err); ok {
		return api.CodeUnavailable
	}
	switch {
	case errors.Is(err, workspaces.ErrNotFound):
		return api.CodeNotFound
	case errors.Is(err, workspaces.ErrExists), errors.Is(err, ErrBusy), errors.Is(err, workspaces.ErrIllegalMove):
		return api.CodeConflict
	}
	return api.CodeInternal
}

// Info implements api.Backend.
func (b backend) Info() api.Info {
	return b.info()
}

// Workspaces implements api.Backend.
func (b backend) Workspaces(context.Context) ([]api.Workspace, error) {
	list := []api.Workspace{}
	for _, ws := range b.registry.List() {
		list = append(list, b.show(ws))
	}
	for _, broken := range b.registry.Broken() {
		list = append(list, api.Workspace{Name: broken.Name, Hostname: b.hostname(broken.Name), Broken: broken.Err.Error()})
	}
	slices.SortFunc(list, func(a, b api.Workspace) int { return strings.Compare(a.Name, b.Name) })
	return list, nil
}

// Workspace implements api.Backend.
func (b backend) Workspace(_ context.Context, name string) (api.Workspace, error) {
	ws, err := b.registry.Get(name)
	if err != nil {
		return api.Workspace{}, err
	}
	return b.show(ws), nil
}

// show is a workspace as the API shows it.
func (g *Gateway) show(ws workspaces.Workspace) api.Workspace {
	out := api.Workspace{
		Name: ws.Name, Hostname: g.hostname(ws.Name), Address: ws.Address.String(), Created: ws.Created,
		Active: ws.Active, Targets: []api.Target{}, Services: []api.Service{}, Ports: []api.Port{},
		URL: g.url(ws.Name, ""),
	}
	for _, t := range ws.Targets {
		out.Targets = append(out.Targets, g.showTarget(t))
	}
	for _, s := range ws.Services {
		out.Services = append(out.Services, api.Service{Name: s.Name, Port: s.Port, Protocol: string(s.Protocol)})
	}
	if inst := g.instanceOf(ws.ActiveTarget().ID); inst != nil {
		for _, p := range inst.listening() {
			out.Ports = append(out.Ports, api.Port{
				Port: p.Port, Address: p.Address, Process: p.Process, URL: g.url(ws.Name, strconv.Itoa(int(p.Port))),
			})
		}
	}
	return out
}

func (g *Gateway) showTarget(t workspaces.Target) api.Target {
	out := api.Target{
		Name: t.Name, Kind: string(t.Kind), State: string(t.State), Stage: string(t.Stage),
		Reason: t.Reason, Hint: t.Hint, Since: t.Since, Generation: t.Generation,
	}
	if t.Dir != nil {
		out.Dir = t.Dir.Path
	}
	if t.VM != nil {
		out.Image, out.CPUs, out.MemoryMB, out.Policy = t.VM.Image, t.VM.CPUs, t.VM.MemoryMB, string(t.VM.Policy)
	}
	if inst := g.instanceOf(t.ID); inst != nil {
		sessions, _ := inst.watch()
		for _, s := range sessions {
			out.Links = append(out.Links, s.Link())
			out.Agent = s.Intro().AgentVersion
		}
	}
	return out
}

// url is the HTTPS address of a workspace, or of a child of it.
func (g *Gateway) url(name, child string) string {
	host := g.hostname(name)
	if child != "" {
		host = child + "." + host
	}
	if p := g.listened.httpsPort; p != 443 { // decided before anything else runs
		return fmt.Sprintf("https://%s:%d/", host, p)
	}
	return "https://" + host + "/"
}

// Create implements api.Backend.
func (b backend) Create(ctx context.Context, req api.CreateRequest) (api.Workspace, error) {
	spec, err := b.specOf(ctx, req)
	if err != nil {
		return api.Workspace{}, err
	}
	if exists(b.vmDir(req.Name)) && !b.known(req.Name) {
		return api.Workspace{}, &invalidError{
			fmt.Sprintf("%s holds a virtual machine that the registry does not know", b.vmDir(req.Name)),
			"choose another name, or move the folder away",
		}
	}
	ws, err := b.registry.Create(spec)
	if err != nil {
		return api.Workspace{}, err
	}
	b.log.InfoContext(ctx, "workspace created", "workspace", ws.Name)
	b.relisten(ctx, ws.Name)
	b.renewSSH(ctx)
	if !req.NoStart {
		// The workspace is there now; what stops its start is its state, not the request's error.
		if err := b.begin(ctx, ws.Name); err != nil {
			b.log.WarnContext(ctx, "start refused", "workspace", ws.Name, "err", err)
		}
	}
	return b.Workspace(ctx, ws.Name)
}

// known says whether the registry has a record of the name, readable or not.
func (g *Gateway) known(name string) bool {
	_, err := g.registry.Get(name)
	return err == nil || errors.Is(err, workspaces.ErrBroken)
}

// specOf checks what only the gateway can: that the image or folder is there.
func (b backend) specOf(ctx context.Context, req api.CreateRequest) (workspaces.Spec, error) {
	spec := workspaces.Spec{Name: req.Name}
	target := workspaces.TargetSpec{Name: workspaces.DefaultTarget, Desired: workspaces.DesiredStopped}
	switch {
	case (req.Image == "") == (req.Dir == ""):
		return spec, &invalidError{"give either an image or a folder", "helix create NAME --image tiny, or --dir PATH"}
	case req.Dir != "":
		target.Kind, target.Dir = workspaces.KindDir, &workspaces.DirSpec{Path: filepath.Clean(req.Dir)}
		if err := checkDir(req.Dir); err != nil {
			return spec, err
		}
	default:
		img, err := b.images.Get(ctx, req.Image)
		if err != nil {
			return spec, err
		}
		target.Kind = workspaces.KindVM
		target.VM = &workspaces.VMSpec{
			Image: req.Image, ImageDigest: img.Digest, CPUs: req.CPUs, MemoryMB: req.MemoryMB,
			Policy: workspaces.Policy(req.Policy), Accel: workspaces.Accel(req.Accel),
		}
		if err := b.plannable(ctx, req.Name, *target.VM); err != nil {
			return spec, err
		}
	}
	spec.Targets = []workspaces.TargetSpec{target}
	for _, s := range req.Services {
		spec.Services = append(spec.Services, workspaces.Service{
			Name: s.Name, Port: s.Port, Protocol: workspaces.Protocol(s.Protocol),
		})
	}
	return spec, nil
}

// Start implements api.Backend.
func (b backend) Start(ctx context.Context, name string) (api.Workspace, error) {
	if _, err := b.registry.Get(name); err != nil {
		return api.Workspace{}, err
	}
	if err := b.begin(ctx, name); err != nil {
		return api.Workspace{}, err
	}
	return b.Workspace(ctx, name)
}

// Stop implements api.Backend.
func (b backend) Stop(ctx context.Context, name string) (api.Workspace, error) {
	return b.wind(ctx, name, workspaces.DesiredStopped, nil)
}

// Restart implements api.Backend.
func (b backend) Restart(ctx context.Context, name string) (api.Workspace, error) {
	return b.wind(ctx, name, workspaces.DesiredRunning, func(ctx context.Context, k *keeper) {
		s, err := k.prepare(ctx)
		if err != nil {
			b.log.WarnContext(ctx, "restart refused", "workspace", name, "err", err)
			k.refused(ctx, err)
			return
		}
		if s != nil {
			k.start(ctx, *s)
		}
	})
}

// wind stops the workspace in an owned goroutine, and does next afterwards.
func (b backend) wind(ctx context.Context, name string, desired workspaces.Desired, next func(context.Context, *keeper)) (api.Workspace, error) {
	ws, err := b.registry.Get(name)
	if err != nil {
		return api.Workspace{}, err
	}
	k, err := b.acquireToStop(ctx, name)
	if err != nil {
		return api.Workspace{}, err
	}
	if _, err := b.registry.SetDesired(name, ws.Active, desired); err != nil {
		k.give()
		return api.Workspace{}, err
	}
	if !b.spawn(func(ctx context.Context) {
		defer k.give()
		err := k.halt(ctx)
		if err != nil {
			b.log.ErrorContext(ctx, "stop failed", "workspace", name, "err", err)
		} else if next != nil {
			next(ctx, k)
		}
	}) {
		k.give()
		return api.Workspace{}, errDown
	}
	return b.Workspace(ctx, name)
}

// Remove implements api.Backend. Once begun it goes on when the client leaves.
func (b backend) Remove(ctx context.Context, name string) error {
	ws, err := b.registry.Get(name)
	if err != nil && !errors.Is(err, workspaces.ErrBroken) {
		return err
	}
	done := make(chan error, 1) // one answer, which nobody may be waiting for any more
	if !b.spawn(func(ctx context.Context) { done <- b.removeNow(ctx, name, ws.ID) }) {
		return errDown
	}
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("remove %q goes on without you: %w", name, context.Cause(ctx))
	}
}

// removeNow removes the workspace with this ID; "" is one whose record cannot
// be read.
func (g *Gateway) removeNow(ctx context.Context, name, id string) error {
	k, err := g.acquireToStop(ctx, name)
	if err != nil {
		return err
	}
	defer k.give()
	if id == "" {
		err = k.forget(ctx)
	} else {
		err = k.remove(ctx, id)
	}
	if err != nil {
		return err
	}
	g.log.InfoContext(ctx, "workspace removed", "workspace", name)
	g.renewSSH(ctx)
	return nil
}

// LastEvent implements api.Backend.
func (b backend) LastEvent() uint64 { return b.registry.Seq() }

// Events implements api.Backend.
func (b backend) Events(ctx context.Context, after uint64, name string, send func(api.Event) error) error {
	for e, err := range b.registry.Watch(ctx, after) {
		out := api.Event{
			Seq: e.Seq, Time: e.Time, Kind: string(e.Kind), Workspace: e.Workspace, Target: e.Target,
			State: string(e.State), Stage: string(e.Stage), Message: e.Reason, Hint: e.Hint,
		}
		if lost, ok := errors.AsType[*workspaces.LostError](err); ok {
			out = api.Event{Kind: "lost", Message: lost.Error()}
		} else if err != nil {
			return err
		}
		everybodys := out.Workspace == "" && out.Kind == string(EventWarning) || out.Kind == "lost"
		if name != "" && out.Workspace != name && !everybodys {
			continue
		}
		if err := send(out); err != nil {
			return err
		}
	}
	return nil
}
