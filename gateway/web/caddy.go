package web

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"text/template"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"

	// The parts of Caddy that the configuration names.
	_ "github.com/caddyserver/caddy/v2/modules/caddyevents"
	_ "github.com/caddyserver/caddy/v2/modules/caddyhttp"
	_ "github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	_ "github.com/caddyserver/caddy/v2/modules/caddytls"
	_ "github.com/caddyserver/caddy/v2/modules/filestorage"

	"helix.local/helix"
)

// Caddy keeps its modules, and they keep some state, in package variables:
// the modules below are registered once a process and find their Server by
// the name in the configuration. caddyMu guards Caddy's loading and unloading,
// which its own entry points serialise and the ones used here do not.
var (
	registerOnce sync.Once
	caddyMu      sync.Mutex

	instancesMu sync.Mutex
	instances   = map[string]*Server{}
)

func addInstance(s *Server) {
	instancesMu.Lock()
	defer instancesMu.Unlock()
	instances[s.id] = s
}

func removeInstance(s *Server) {
	instancesMu.Lock()
	defer instancesMu.Unlock()
	delete(instances, s.id)
}

func instance(id string) (*Server, error) {
	instancesMu.Lock()
	defer instancesMu.Unlock()
	s := instances[id]
	if s == nil {
		return nil, fmt.Errorf("no web server %q in this process", id)
	}
	return s, nil
}

// servers is what differs between the two inlets. HTTP/3 needs UDP.
type servers struct {
	Port      int
	Protocols string
}

// render makes the Caddyfile of s.
func render(s *Server) ([]byte, error) {
	t, err := template.New("Caddyfile.tmpl").Funcs(template.FuncMap{"quote": strconv.Quote}).Parse(helix.Caddyfile)
	if err != nil {
		return nil, fmt.Errorf("parse template: %w", err)
	}
	var out bytes.Buffer
	err = t.Execute(&out, map[string]any{
		"ID":       s.id,
		"Storage":  s.cfg.Storage,
		"Grace":    s.cfg.Grace,
		"LogLevel": logLevel(s.log),
		"Servers":  []servers{{443, "h1 h2"}, {80, "h1 h2c"}},
	})
	if err != nil {
		return nil, fmt.Errorf("render template: %w", err)
	}
	return out.Bytes(), nil
}

// logLevel keeps Caddy from building log lines that nobody wants.
func logLevel(log *slog.Logger) string {
	if log.Enabled(context.Background(), slog.LevelDebug) {
		return "DEBUG"
	}
	return "WARN"
}

// adapt turns the Caddyfile into Caddy's own form.
func adapt(file []byte) (*caddy.Config, error) {
	adapter := caddyfile.Adapter{ServerType: httpcaddyfile.ServerType{}}
	raw, warnings, err := adapter.Adapt(file, nil)
	if err != nil {
		return nil, fmt.Errorf("adapt Caddyfile: %w", err)
	}
	for _, w := range warnings {
		if w.Directive != "" { // the others are about white space
			return nil, fmt.Errorf("adapt Caddyfile: %s", w.String())
		}
	}
	cfg := new(caddy.Config)
	if err := json.Unmarshal(raw, cfg); err != nil {
		return nil, fmt.Errorf("decode configuration: %w", err)
	}
	return cfg, nil
}

// startCaddy loads and starts the configuration of s. It does not use
// caddy.Run: that holds one configuration a process, so a second gateway
// would end the first, and it reports to the service manager, which is the
// gateway's task. See docs/adr, "Caddy as a library".
func startCaddy(s *Server) (startedApps, error) {
	file, err := render(s)
	if err != nil {
		return startedApps{}, err
	}
	cfg, err := adapt(file)
	if err != nil {
		return startedApps{}, err
	}
	caddyMu.Lock()
	defer caddyMu.Unlock()
	// The apps are loaded below, in a context that can be cancelled; Caddy
	// keeps the cancel function of this one to itself.
	apps := cfg.AppsRaw
	cfg.AppsRaw = nil
	base, err := caddy.ProvisionContext(cfg)
	if err != nil {
		return startedApps{}, fmt.Errorf("load Caddy: %w", err)
	}
	cfg.AppsRaw = apps
	ctx, cancel := caddy.NewContext(base)
	started, err := startApps(ctx)
	if err != nil {
		cancel()
		return startedApps{}, err
	}
	started.cancel = cancel
	return started, nil
}

func startApps(ctx caddy.Context) (startedApps, error) {
	app := func(name string) (caddy.App, error) {
		m, err := ctx.App(name)
		if err != nil {
			return nil, fmt.Errorf("load Caddy's %s part: %w", name, err)
		}
		return m.(caddy.App), nil
	}
	var apps startedApps
	var err error
	if apps.tls, err = app("tls"); err != nil {
		return startedApps{}, err
	}
	if apps.http, err = app("http"); err != nil {
		return startedApps{}, err
	}
	if err := apps.tls.Start(); err != nil {
		return startedApps{}, fmt.Errorf("start Caddy's tls part: %w", err)
	}
	if err := apps.http.Start(); err != nil {
		return startedApps{}, errors.Join(fmt.Errorf("start Caddy's http part: %w", err), apps.tls.Stop())
	}
	return apps, nil
}

// startedApps is a running Caddy.
type startedApps struct {
	http, tls caddy.App
	cancel    context.CancelFunc
}

// stopServers ends accepting and starts the grace time of requests.
func (a startedApps) stopServers() error { return a.http.Stop() }

// unload frees what the modules hold.
func (a startedApps) unload() {
	caddyMu.Lock()
	defer caddyMu.Unlock()
	_ = a.tls.Stop() // always nil: it stops tickers
	a.cancel()
}
