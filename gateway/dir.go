package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"helix.local/helix/agent/wire"
	"helix.local/helix/workspaces"
)

// The times of a dir target. Its agent is a child process on this machine.
const (
	dirBoot   = 20 * time.Second
	dirHealth = 20 * time.Second
	dirStop   = 5 * time.Second // from the request to the end; then it is killed
)

// dirRunner is the agent process of a dir target. Its only link is a socket
// pair: when the gateway dies, the link ends and the agent with it.
type dirRunner struct {
	g      *Gateway
	target string
	link   net.Conn
	cmd    *exec.Cmd
	exited chan struct{} // closed when the process has been waited for
	err    error         // then: how it ended
}

// checkDir says what is wrong with a workspace folder.
func checkDir(path string) error {
	if !filepath.IsAbs(path) {
		return invalid("folder %q is not an absolute path", path)
	}
	info, err := os.Stat(path)
	if err != nil {
		return invalid("folder %q cannot be used: %v", path, errors.Unwrap(err))
	}
	if !info.IsDir() {
		return invalid("%q is not a folder", path)
	}
	if err := readable(path); err != nil {
		return invalid("folder %q cannot be read: %v", path, err)
	}
	return nil
}

func (g *Gateway) prepareDir(_ workspaces.Workspace, t workspaces.Target) (prepared, error) {
	if err := checkDir(t.Dir.Path); err != nil {
		return nil, err
	}
	return func(ws workspaces.Workspace, t workspaces.Target, token wire.Secret) starting {
		return starting{
			ws: ws, target: t, boot: dirBoot, health: dirHealth,
			launch: func(ctx context.Context, _ *instance) (runner, error) { return g.launchDir(ctx, ws, t, token) },
		}
	}, nil
}

func (g *Gateway) launchDir(ctx context.Context, ws workspaces.Workspace, t workspaces.Target, token wire.Secret) (runner, error) {
	boot, err := json.Marshal(wire.Boot{
		Version: wire.Version, Workspace: ws.Name, Zone: g.zones[0], Target: t.ID, Generation: t.Generation,
		Token: token, GatewayKey: g.publicKey(), Dir: t.Dir.Path, Address: ws.Backend.String(),
	})
	if err != nil {
		return nil, fmt.Errorf("describe the target to its agent: %w", err)
	}
	if err := endStrays(t.ID); err != nil {
		return nil, err
	}
	folder := g.path("dir", ws.Name)
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return nil, fmt.Errorf("prepare the log of %q: %w", ws.Name, err)
	}
	// A new file, so that whoever follows the old one sees that it is another.
	if err := os.Remove(filepath.Join(folder, logName)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("prepare the log of %q: %w", ws.Name, err)
	}
	log, err := os.OpenFile(filepath.Join(folder, logName), os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o600)
	if err != nil {
		return nil, fmt.Errorf("prepare the log of %q: %w", ws.Name, err)
	}
	defer log.Close()
	r := &dirRunner{g: g, target: t.ID, exited: make(chan struct{})}
	if err := r.spawn(ctx, append(boot, '\n'), log); err != nil {
		return nil, err
	}
	return r, nil
}

// logName is the file with what a dir target's agent says.
const logName = "agent.log"

// spawn starts the agent with its end of the socket pair as descriptor 3.
func (r *dirRunner) spawn(ctx context.Context, boot []byte, log *os.File) error {
	ours, theirs, err := socketPair()
	if err != nil {
		return err
	}
	defer theirs.Close()
	// Not bound to ctx: the process lives as long as its link, and stop ends it.
	r.cmd = exec.CommandContext(context.WithoutCancel(ctx), r.g.cfg.Agent, "dir")
	r.cmd.ExtraFiles = []*os.File{theirs}
	r.cmd.Stdout, r.cmd.Stderr = log, log
	r.cmd.SysProcAttr = ownGroup()
	stdin, err := r.cmd.StdinPipe()
	if err != nil {
		return errors.Join(fmt.Errorf("start the agent: %w", err), ours.Close())
	}
	if err := r.cmd.Start(); err != nil {
		return errors.Join(fmt.Errorf("start the agent: %w", err), ours.Close())
	}
	if !r.g.spawn(func(context.Context) {
		r.err = r.cmd.Wait()
		close(r.exited)
	}) {
		return errors.Join(errDown, ours.Close(), r.cmd.Process.Kill(), r.cmd.Wait())
	}
	r.link = ours
	_, err = stdin.Write(boot)
	if err := errors.Join(err, stdin.Close()); err != nil {
		r.reap(ctx)
		return fmt.Errorf("start the agent: %s: %w", exitText(r.err), err)
	}
	return nil
}

func (r *dirRunner) tend(ctx context.Context, inst *instance) {
	if err := r.g.admit(ctx, r.link, wire.LinkUnix); err != nil {
		inst.log.DebugContext(ctx, "agent link", "err", err)
	}
	r.reap(ctx)
	if ctx.Err() != nil {
		return
	}
	inst.end(fmt.Errorf("its agent ended: %s", exitText(r.err)))
}

// reap closes the link, which ends the agent and all it started, and waits for
// that. Where the agent could not, what it left is ended here.
func (r *dirRunner) reap(ctx context.Context) {
	_ = r.link.Close() // it may have ended first
	t := time.NewTimer(dirStop)
	defer t.Stop()
	select {
	case <-r.exited:
	case <-t.C:
		_ = r.cmd.Process.Kill() // not waited for yet, so the number is still its own
		<-r.exited
	}
	if err := endStrays(r.target); err != nil {
		r.g.log.WarnContext(ctx, "agent left something behind", "err", err)
	}
}

func exitText(err error) string {
	if err == nil {
		return "exit status 0"
	}
	return err.Error()
}

func (r *dirRunner) stop(ctx context.Context, inst *instance) error {
	ctx, cancel := context.WithTimeout(ctx, dirStop)
	defer cancel()
	if err := inst.call(ctx, http.MethodPost, wire.PathShutdown, nil, nil); err != nil {
		inst.log.WarnContext(ctx, "agent not asked to shut down", "err", err)
	}
	r.reap(ctx)
	return nil
}

func (r *dirRunner) kill(ctx context.Context) error {
	r.reap(ctx)
	return nil
}
