package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"helix.local/helix/gateway/api"
	"helix.local/helix/sshd"
	"helix.local/helix/vmctl/image"
	"helix.local/helix/workspaces"
)

// Images implements api.Backend.
func (b backend) Images(ctx context.Context) ([]api.Image, error) {
	stored, err := b.images.List(ctx)
	if err != nil {
		return nil, err
	}
	list := []api.Image{}
	for _, img := range stored {
		list = append(list, b.showImage(img))
	}
	return list, nil
}

func (g *Gateway) showImage(img image.Image) api.Image {
	return api.Image{
		Name: img.Name, Digest: img.Digest, Size: img.Size, Created: img.Created,
		Kernel: img.Meta.Kernel, Used: g.imageUsers(img.Name),
	}
}

// imageUsers are the workspaces whose target was made from the image.
func (g *Gateway) imageUsers(name string) []string {
	var users []string
	for _, ws := range g.registry.List() {
		for _, t := range ws.Targets {
			if t.VM != nil && image.Reference(t.VM.Image) == image.Reference(name) {
				users = append(users, ws.Name)
				break
			}
		}
	}
	return users
}

// BuildImage implements api.Backend.
func (b backend) BuildImage(ctx context.Context, name string, progress func(api.BuildProgress)) (api.Image, error) {
	img, err := b.images.Build(ctx, name, image.BuildConfig{
		Agent: b.cfg.Agent,
		Progress: func(p image.Progress) {
			progress(api.BuildProgress{Step: p.Step, Done: int64(p.Done), Total: int64(p.Total)})
		},
	})
	if err != nil {
		return api.Image{}, err
	}
	b.note(ctx, workspaces.Event{Kind: EventImage, Reason: "built image " + img.Name})
	return b.showImage(img), nil
}

// RemoveImage implements api.Backend.
func (b backend) RemoveImage(ctx context.Context, name string) error {
	return b.images.Remove(ctx, name, b.imageUsers)
}

// Keys implements api.Backend.
func (b backend) Keys(context.Context) ([]api.Key, error) {
	entries, err := b.authorized.List()
	if err != nil {
		return nil, err
	}
	list := []api.Key{}
	for _, e := range entries {
		list = append(list, showKey(e))
	}
	return list, nil
}

func showKey(e sshd.Entry) api.Key {
	return api.Key{Fingerprint: e.Fingerprint(), Type: e.Type(), Comment: e.Comment}
}

// AddKey implements api.Backend.
func (b backend) AddKey(ctx context.Context, line string) (api.Key, error) {
	added, err := b.authorized.Add(line)
	if err != nil {
		return api.Key{}, asInvalid(err)
	}
	if len(added) == 0 {
		return api.Key{}, &codedError{&invalidError{"that key may log in already", "helix key ls"}, api.CodeConflict}
	}
	b.identifyAll(ctx) // who is told late lets the key in late: no harm
	return showKey(added[0]), nil
}

// RemoveKey implements api.Backend.
func (b backend) RemoveKey(ctx context.Context, selector string) (api.Key, error) {
	removed, err := b.authorized.Remove(selector)
	if errors.Is(err, sshd.ErrNoKey) {
		return api.Key{}, &codedError{err, api.CodeNotFound}
	}
	if err != nil {
		return api.Key{}, asInvalid(err)
	}
	if late := b.identifyAll(ctx); len(late) > 0 {
		b.warn(ctx, api.Warning{
			Message: fmt.Sprintf("key %s may still log in at %s: their agents could not be told yet", removed.Fingerprint(), strings.Join(late, ", ")),
			Hint:    "they are told as soon as they answer; helix stop ends them at once",
		})
	}
	return showKey(removed), nil
}

// asInvalid keeps the text and the hint of err and says that the request caused it.
func asInvalid(err error) error {
	return &invalidError{err.Error(), hintOf(err)}
}

// SSH implements api.Backend.
func (b backend) SSH(context.Context) (api.SSHAccess, error) {
	return b.writeSSH()
}

// writeSSH brings the client configuration and the known hosts up to date and
// says where they are.
func (g *Gateway) writeSSH() (api.SSHAccess, error) {
	g.sshMu.Lock()
	defer g.sshMu.Unlock()
	access := api.SSHAccess{
		ConfigFile: g.path("ssh", "config"), KnownHosts: g.path("ssh", "known_hosts"), KeyFile: g.keys.ClientPath(),
	}
	gw, err := g.keys.Host(gatewayLabel, g.registry.Gateway())
	if err != nil {
		return access, err
	}
	hosts := []sshd.Host{gw}
	for _, ws := range g.registry.List() {
		host, err := g.hostOf(ws)
		if err != nil { // costs only itself
			g.log.Warn("SSH key cannot be read", "workspace", ws.Name, "err", err) //nolint:sloglint // no ctx is at hand
			continue
		}
		hosts = append(hosts, host)
	}
	text, err := sshd.ClientConfig{
		Helix: g.cfg.Helix, State: g.cfg.State, KnownHosts: access.KnownHosts,
		Identity: access.KeyFile, Zones: g.zones, Hosts: hosts,
	}.Text()
	if err != nil {
		return access, err
	}
	access.Config = string(text)
	return access, errors.Join(
		renewFile(access.KnownHosts, sshd.KnownHosts(g.keys.CA(), g.zones, hosts)),
		renewFile(access.ConfigFile, text),
	)
}

// renewSSH brings the SSH client's files up to date after names have changed.
func (g *Gateway) renewSSH(ctx context.Context) {
	if _, err := g.writeSSH(); err != nil {
		g.log.WarnContext(ctx, "SSH client files not renewed", "err", err)
	}
}

// Logs implements api.Backend.
func (b backend) Logs(ctx context.Context, name string, lines int, follow bool, w io.Writer) error {
	ws, err := b.registry.Get(name)
	if err != nil {
		return err
	}
	return follower{path: b.consoleOf(ws), lines: lines, follow: follow}.copy(ctx, w)
}

// consoleOf is the file with what the target's console, or its agent, said.
func (g *Gateway) consoleOf(ws workspaces.Workspace) string {
	if ws.ActiveTarget().Kind == workspaces.KindDir {
		return g.path("dir", ws.Name, logName)
	}
	return filepath.Join(g.vmDir(ws.Name), "console.log")
}

// erase ends what may still run of a workspace, and removes its files.
func (g *Gateway) erase(ctx context.Context, name string) error {
	g.unlisten(ctx, name)
	if err := g.cleanVM(ctx, g.vmDir(name)); err != nil {
		return err
	}
	for _, folder := range []string{g.vmDir(name), g.path("dir", name)} {
		if err := os.RemoveAll(folder); err != nil {
			return fmt.Errorf("remove the files of %q: %w", name, err)
		}
	}
	return nil
}

// forgetHost removes the SSH identity of a name that is free again.
func (g *Gateway) forgetHost(name string) error {
	g.sshMu.Lock() // writeSSH would make it anew for a name it has just read
	defer g.sshMu.Unlock()
	return g.keys.Forget(name)
}
