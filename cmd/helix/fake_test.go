//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"helix.local/helix/agent/wire"
	"helix.local/helix/gateway/api"
	"helix.local/helix/sshd"
)

// fakeGateway is a small working gateway behind real sockets: its workspaces
// are records, their events real, and their SSH server runs commands on this
// machine. Fields are set before listen; guarded ones by mu.
type fakeGateway struct {
	state string
	// startEvents is what a start goes through, in place of a good one.
	startEvents []api.Event
	// hold stops a start after its first event until the channel is closed.
	hold     chan struct{}
	keys     *sshd.Keys
	impostor bool // answers SSH with another workspace's key

	mu      sync.Mutex
	changed *sync.Cond
	all     map[string]api.Workspace
	events  []api.Event
	images  []api.Image
	logins  []api.Key
	console map[string]string
	echoed  func(net.Conn) // serves ports other than 22

	close func()
}

// shortDir is a temporary folder whose path leaves room for a socket's name.
func shortDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "hx")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func newFake(t testing.TB) *fakeGateway {
	t.Helper()
	f := &fakeGateway{state: shortDir(t), all: map[string]api.Workspace{}, console: map[string]string{}}
	f.changed = sync.NewCond(&f.mu)
	var err error
	if f.keys, err = sshd.OpenKeys(sshd.KeysConfig{Dir: filepath.Join(f.state, "ssh")}); err != nil {
		t.Fatal(err)
	}
	return f
}

// listen serves both sockets until the test ends or f.close is called.
func (f *fakeGateway) listen(t testing.TB) *fakeGateway {
	t.Helper()
	ln, err := net.Listen("unix", filepath.Join(f.state, "api.sock"))
	if err != nil {
		t.Fatal(err)
	}
	proxy, err := net.Listen("unix", filepath.Join(f.state, "proxy.sock"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	server := &http.Server{
		Handler:  api.Handler(f, slog.New(slog.DiscardHandler)),
		ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError), BaseContext: func(net.Listener) context.Context { return ctx },
	}
	var work sync.WaitGroup
	work.Go(func() { _ = server.Serve(ln) }) // ends with close
	work.Go(func() { f.serveProxy(ctx, proxy) })
	f.close = sync.OnceFunc(func() {
		cancel()
		f.mu.Lock()
		f.changed.Broadcast()
		f.mu.Unlock()
		_ = server.Close()
		_ = proxy.Close()
		work.Wait()
	})
	t.Cleanup(f.close)
	return f
}

func notFound(what string) error {
	return &codedError{api.CodeNotFound, what + " is not there", "did you mean demo?"}
}

type codedError struct {
	code          api.Code
	message, hint string
}

func (e *codedError) Error() string  { return e.message }
func (e *codedError) Hint() string   { return e.hint }
func (e *codedError) Code() api.Code { return e.code }

func (f *fakeGateway) Info() api.Info {
	return api.Info{
		Version: "9.9.9", PID: 4711, State: f.state, Zone: "helix.local", Zones: []string{"helix.local", "helix.internal"},
		Started: time.Unix(0, 0), Address: "127.88.0.1", DNS: "127.88.0.1:10053", SSH: "127.88.0.1:10022",
		SSHPort: 10022, HTTP: 10080, HTTPS: 10443, Root: "/ca/root.crt",
		Warnings: []api.Warning{{Message: "port 53 is taken", Hint: "stop dnsmasq"}},
	}
}

func (f *fakeGateway) Workspaces(context.Context) ([]api.Workspace, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var all []api.Workspace
	for _, ws := range f.all {
		all = append(all, ws)
	}
	slices.SortFunc(all, func(a, b api.Workspace) int { return strings.Compare(a.Name, b.Name) })
	return all, nil
}

func (f *fakeGateway) Workspace(_ context.Context, name string) (api.Workspace, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	ws, ok := f.all[name]
	if !ok {
		return ws, notFound(fmt.Sprintf("workspace %q", name))
	}
	return ws, nil
}

// put stores a workspace in a state.
func (f *fakeGateway) put(name, kind, state string) api.Workspace {
	ws := api.Workspace{
		Name: name, Hostname: name + ".helix.local", Address: "127.88.0.2", URL: "https://" + name + ".helix.local:10443",
		Created: time.Unix(0, 0), Active: "main", Targets: []api.Target{{Name: "main", Kind: kind, State: state, Since: time.Unix(0, 0)}},
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.all[name] = ws
	return ws
}

func (f *fakeGateway) emit(e api.Event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	e.Seq = uint64(len(f.events) + 1)
	e.Time = time.Unix(int64(e.Seq), 0)
	if ws, ok := f.all[e.Workspace]; ok && e.Kind == kindState {
		ws.Targets = slices.Clone(ws.Targets)
		ws.Targets[0].State, ws.Targets[0].Stage, ws.Targets[0].Reason = e.State, e.Stage, e.Message
		f.all[e.Workspace] = ws
	}
	f.events = append(f.events, e)
	f.changed.Broadcast()
}

// begin plays a start or a stop and returns how things were at once.
func (f *fakeGateway) begin(name string, events ...api.Event) (api.Workspace, error) {
	for i, e := range events {
		e.Kind, e.Workspace = kindOr(e.Kind), name
		f.emit(e)
		if i == 0 && f.hold != nil {
			go func() {
				<-f.hold
				for _, e := range events[1:] {
					e.Kind, e.Workspace = kindOr(e.Kind), name
					f.emit(e)
				}
			}()
			break
		}
	}
	ws, err := f.Workspace(context.Background(), name)
	if err == nil && len(ws.Targets) > 0 {
		ws.Targets = slices.Clone(ws.Targets)
		ws.Targets[0].State = events[0].State
	}
	return ws, err
}

func kindOr(kind string) string {
	if kind == "" {
		return kindState
	}
	return kind
}

func (f *fakeGateway) starting() []api.Event {
	if f.startEvents != nil {
		return f.startEvents
	}
	return []api.Event{
		{State: stateStarting, Stage: "prepare"},
		{State: stateStarting, Stage: "boot"},
		{Kind: kindWarning, Message: "no KVM here", Hint: "use a machine with it"},
		{State: stateStarting, Stage: "health"},
		{State: stateRunning},
	}
}

func (f *fakeGateway) Create(ctx context.Context, req api.CreateRequest) (api.Workspace, error) {
	if _, err := f.Workspace(ctx, req.Name); err == nil {
		return api.Workspace{}, &codedError{api.CodeConflict, fmt.Sprintf("workspace %q is there already", req.Name), "choose another name"}
	}
	kind := "dir"
	if req.Image != "" {
		kind = "vm"
	}
	ws := f.put(req.Name, kind, stateStopped)
	f.mu.Lock()
	ws.Services = req.Services
	ws.Targets[0].Dir, ws.Targets[0].Image = req.Dir, req.Image
	f.all[req.Name] = ws
	f.mu.Unlock()
	f.emit(api.Event{Kind: "created", Workspace: req.Name})
	if req.NoStart {
		return ws, nil
	}
	return f.begin(req.Name, f.starting()...)
}

func (f *fakeGateway) Start(ctx context.Context, name string) (api.Workspace, error) {
	ws, err := f.Workspace(ctx, name)
	if err != nil || active(ws).State == stateRunning {
		return ws, err
	}
	return f.begin(name, f.starting()...)
}

func (f *fakeGateway) Stop(ctx context.Context, name string) (api.Workspace, error) {
	if _, err := f.Workspace(ctx, name); err != nil {
		return api.Workspace{}, err
	}
	return f.begin(name, api.Event{State: stateStopping}, api.Event{State: stateStopped})
}

func (f *fakeGateway) Restart(ctx context.Context, name string) (api.Workspace, error) {
	if _, err := f.Workspace(ctx, name); err != nil {
		return api.Workspace{}, err
	}
	return f.begin(name, append([]api.Event{{State: stateStopping}, {State: stateStopped}}, f.starting()...)...)
}

func (f *fakeGateway) Remove(_ context.Context, name string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, ok := f.all[name]; !ok {
		return notFound(fmt.Sprintf("workspace %q", name))
	}
	delete(f.all, name)
	return nil
}

func (f *fakeGateway) Plan(ctx context.Context, name string) (api.Plan, error) {
	_, err := f.Workspace(ctx, name)
	return api.Plan(`{"version":1,"argv":["qemu"]}`), err
}

func (f *fakeGateway) Logs(_ context.Context, name string, lines int, _ bool, w io.Writer) error {
	f.mu.Lock()
	all := strings.SplitAfter(f.console[name], "\n")
	f.mu.Unlock()
	if lines > 0 && len(all) > lines+1 {
		all = all[len(all)-lines-1:]
	}
	_, err := io.WriteString(w, strings.Join(all, ""))
	return err
}

func (f *fakeGateway) Events(ctx context.Context, after uint64, name string, send func(api.Event) error) error {
	stop := context.AfterFunc(ctx, func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.changed.Broadcast()
	})
	defer stop()
	f.mu.Lock()
	defer f.mu.Unlock()
	next := int(min(after, uint64(len(f.events))))
	for ctx.Err() == nil {
		if next == len(f.events) {
			f.changed.Wait()
			continue
		}
		e := f.events[next]
		next++
		if name != "" && e.Workspace != name {
			continue
		}
		f.mu.Unlock()
		err := send(e)
		f.mu.Lock()
		if err != nil {
			return err
		}
	}
	return nil
}

func (f *fakeGateway) Images(context.Context) ([]api.Image, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.images), nil
}

func (f *fakeGateway) BuildImage(_ context.Context, name string, progress func(api.BuildProgress)) (api.Image, error) {
	progress(api.BuildProgress{Step: "kernel", Done: 5 << 20, Total: 10 << 20})
	progress(api.BuildProgress{Step: "kernel", Done: 10 << 20, Total: 10 << 20, Message: "Linux 6.1"})
	if name != "tiny" {
		return api.Image{}, notFound(fmt.Sprintf("recipe %q", name))
	}
	progress(api.BuildProgress{Step: "initramfs"})
	image := api.Image{Name: name, Digest: "sha256:abc", Size: 30 << 20, Created: time.Unix(0, 0), Kernel: "6.1"}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.images = append(f.images, image)
	return image, nil
}

func (f *fakeGateway) RemoveImage(_ context.Context, name string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	before := len(f.images)
	f.images = slices.DeleteFunc(f.images, func(m api.Image) bool { return m.Name == name })
	if len(f.images) == before {
		return notFound(fmt.Sprintf("image %q", name))
	}
	return nil
}

func (f *fakeGateway) Keys(context.Context) ([]api.Key, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.logins), nil
}

func (f *fakeGateway) AddKey(_ context.Context, line string) (api.Key, error) {
	entries, err := sshd.ParseEntries([]byte(line))
	if err != nil {
		return api.Key{}, &codedError{api.CodeInvalid, err.Error(), ""}
	}
	key := api.Key{Fingerprint: entries[0].Fingerprint(), Type: entries[0].Type(), Comment: entries[0].Comment}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.logins = append(f.logins, key)
	return key, nil
}

func (f *fakeGateway) RemoveKey(_ context.Context, selector string) (api.Key, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for i, k := range f.logins {
		if k.Comment == selector || strings.HasPrefix(k.Fingerprint, selector) {
			f.logins = slices.Delete(f.logins, i, i+1)
			return k, nil
		}
	}
	return api.Key{}, notFound(fmt.Sprintf("key %q", selector))
}

func (f *fakeGateway) SSH(context.Context) (api.SSHAccess, error) {
	host, err := f.keys.Host("demo")
	if err != nil {
		return api.SSHAccess{}, err
	}
	known := filepath.Join(f.state, "ssh", "known_hosts")
	if err := os.WriteFile(known, sshd.KnownHosts(f.keys.CA(), nil, []sshd.Host{host}), 0o600); err != nil {
		return api.SSHAccess{}, err
	}
	return api.SSHAccess{
		Config: "Host *.helix.local\n", ConfigFile: filepath.Join(f.state, "ssh", "config"), KnownHosts: known, KeyFile: f.keys.ClientPath(),
	}, nil
}

// serveProxy answers on the proxy socket: port 22 is SSH, port 1 refuses, and
// the others are echoed's.
func (f *fakeGateway) serveProxy(ctx context.Context, ln net.Listener) {
	var conns sync.WaitGroup
	defer conns.Wait()
	for {
		conn, err := ln.Accept()
		if err != nil {
			return
		}
		conns.Go(func() {
			defer conn.Close()
			stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
			defer stop()
			var req api.ProxyRequest
			if err := wire.ReadFrame(conn, &req); err != nil {
				return
			}
			reply := wire.OpenReply{Status: wire.StatusOK}
			if req.Port == 1 {
				reply = wire.OpenReply{Status: wire.StatusRefused, Message: "nothing listens on port 1 of demo"}
			}
			if err := wire.WriteFrame(conn, reply); err != nil || req.Port == 1 {
				return
			}
			if req.Port == 22 {
				f.serveSSH(conn, strings.TrimSuffix(req.Host, ".helix.local"))
			} else if f.echoed != nil {
				f.echoed(conn)
			}
		})
	}
}

var errRefusedHere = errors.New("refused")

// Code says what kind of error the API answers with.
func (f *fakeGateway) Code(err error) api.Code {
	if e, ok := errors.AsType[*codedError](err); ok {
		return e.code
	}
	return api.CodeInternal
}

// LastEvent is the number of the last event.
func (f *fakeGateway) LastEvent() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return uint64(len(f.events))
}
