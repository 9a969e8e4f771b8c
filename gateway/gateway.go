// Package gateway is the running gateway: it connects the registry, the
// virtual machines, the tunnels, DNS, SSH and HTTP, and owns the router from a
// workspace's name and port to a connection.
//
// New opens what is on disk and Run does the rest; a Gateway runs once. All of
// its goroutines belong to Run and have ended when it returns. Virtual machines
// go on without a gateway, and the next one adopts them; directory targets end.
package gateway

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"regexp"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"helix.local/helix/dnsd"
	"helix.local/helix/gateway/api"
	"helix.local/helix/gateway/front"
	"helix.local/helix/gateway/web"
	"helix.local/helix/sshd"
	"helix.local/helix/vmctl"
	"helix.local/helix/vmctl/image"
	"helix.local/helix/workspaces"
)

// gatewayLabel is the label of the gateway's own name in each zone.
const gatewayLabel = web.GatewayLabel

// companion is the zone that is served beside the configured one.
const companion = "helix.internal"

// Events of the gateway that are no change of a workspace's record.
const (
	EventPorts   workspaces.EventKind = "ports"   // what a workspace listens on
	EventRefused workspaces.EventKind = "refused" // an agent or a user was turned down
	EventWarning workspaces.EventKind = "warning" // the gateway coped with something
	EventImage   workspaces.EventKind = "image"   // an image was built
)

// Ports chooses the ports that the gateway's own services listen on.
type Ports string

// The choices.
const (
	PortsAuto       Ports = "auto"       // the standard ones, and the high ones where those cannot be had
	PortsPrivileged Ports = "privileged" // 22, 53, 80, 443; an error where they cannot be had
	PortsHigh       Ports = "high"       // 10022, 10053, 10080, 10443
)

// Config is what a gateway needs to know.
type Config struct {
	State   string        // absolute path of the state folder
	Zone    string        // "" means helix.local
	Range   netip.Prefix  // addresses of workspaces and their programs, within 127.0.0.0/8; zero means 127.88.0.0/16
	Ports   Ports         // "" means PortsAuto
	Helix   string        // path of this program: shims and ProxyCommand run it
	Agent   string        // path of helix-agent
	Home    string        // whose default public keys may log in from the first start on; "" for nobody's
	Version string        // as info and agents show it
	Grace   time.Duration // for open connections at the end; 0 means 10 s
	Ready   func()        // called once everything listens; may be nil
	Log     *slog.Logger  // nil discards
}

// Gateway is one running gateway.
type Gateway struct {
	cfg        Config
	log        *slog.Logger
	zones      []string
	started    time.Time
	lock       *os.File
	key        ed25519.PrivateKey
	registry   *workspaces.Registry
	images     *image.Store
	keys       *sshd.Keys
	authorized *sshd.Authorized
	jump       *sshd.Server
	ca         *web.CA
	web        *web.Server
	front      *front.Set
	sni        *front.SNI
	dns        *dnsd.Server

	instances sync.Map // target ID -> *instance
	keepers   sync.Map // workspace name -> *keeper
	work      chan func(context.Context)
	closing   chan struct{} // closed when no more work is taken

	sshMu sync.Mutex // one writer of the SSH client's files

	probeMu  sync.Mutex
	probed   vmctl.Host
	probedAt time.Time

	mu       sync.Mutex
	listened listened
	warnings []api.Warning
}

// zoneForm is two or more labels of RFC 1123, without dots at the ends.
var zoneForm = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)+$`)

// Validate fills in the defaults and reports every fault at once.
func (c *Config) Validate() error {
	if c.Zone == "" {
		c.Zone = "helix.local"
	}
	if !c.Range.IsValid() {
		c.Range = netip.MustParsePrefix("127.88.0.0/16")
	}
	if c.Ports == "" {
		c.Ports = PortsAuto
	}
	if c.Grace == 0 {
		c.Grace = 10 * time.Second
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	var faults []error
	if c.Ports != PortsAuto && c.Ports != PortsPrivileged && c.Ports != PortsHigh {
		faults = append(faults, invalid("ports %q is none of auto, privileged, high", c.Ports))
	}
	if !netip.MustParsePrefix("127.0.0.0/8").Contains(c.Range.Addr()) || c.Range.Bits() < 12 || c.Range.Bits() > 24 ||
		c.Range.Contains(netip.MustParseAddr("127.0.0.1")) {
		faults = append(faults, invalid("range %s is not a network of 2^8 to 2^20 addresses in 127.0.0.0/8 without 127.0.0.1", c.Range))
	}
	if !zoneForm.MatchString(c.Zone) {
		faults = append(faults, &invalidError{fmt.Sprintf("zone %q is not two or more lower-case labels", c.Zone), "write it as helix.local"})
	}
	for what, path := range map[string]string{"helix": c.Helix, "helix-agent": c.Agent} {
		if _, err := os.Stat(path); err != nil {
			faults = append(faults, &invalidError{
				fmt.Sprintf("the program %s is not where it should be: %v", what, err),
				"build both programs into one folder, or name the agent with --agent",
			})
		}
	}
	return errors.Join(faults...)
}

// New opens the state folder. Close gives it back if Run is never called.
func New(cfg Config) (_ *Gateway, err error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	g := &Gateway{
		cfg: cfg, log: cfg.Log, zones: []string{cfg.Zone}, started: time.Now(),
		work: make(chan func(context.Context)), closing: make(chan struct{}),
	}
	if cfg.Zone != companion {
		g.zones = append(g.zones, companion)
	}
	if err := prepareState(cfg.State); err != nil {
		return nil, err
	}
	if g.lock, err = lockState(cfg.State); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, g.Close())
		}
	}()
	if err := g.open(); err != nil {
		return nil, err
	}
	return g, nil
}

// open opens each part of the state in turn.
func (g *Gateway) open() (err error) {
	if g.key, err = openKey(g.path("gateway.key")); err != nil {
		return err
	}
	addresses, backends := halves(g.cfg.Range)
	if g.registry, err = workspaces.Open(g.path("registry.db"), workspaces.Options{
		Log: g.log, Range: addresses, Backends: backends,
	}); err != nil {
		return fmt.Errorf("open the registry: %w", err)
	}
	if g.images, err = image.Open(image.Config{Root: g.path("images"), Log: g.log}); err != nil {
		return err
	}
	if g.keys, err = sshd.OpenKeys(sshd.KeysConfig{Dir: g.path("ssh"), Zones: g.zones}); err != nil {
		return err
	}
	if err := g.openAuthorized(); err != nil {
		return err
	}
	if g.ca, err = web.OpenCA(g.path("ca"), g.zones, time.Now); err != nil {
		return err
	}
	return g.assemble()
}

// halves splits a range: workspace addresses come from the lower half, and the
// programs of directory targets may listen in the upper one. So gateways with
// ranges of their own never meet.
func halves(r netip.Prefix) (lower, upper netip.Prefix) {
	bits := r.Bits() + 1
	a := r.Masked().Addr().As4()
	b := a
	b[r.Bits()/8] |= 1 << (7 - r.Bits()%8)
	return netip.PrefixFrom(netip.AddrFrom4(a), bits), netip.PrefixFrom(netip.AddrFrom4(b), bits)
}

// Close gives back what New opened. It is part of Run.
func (g *Gateway) Close() error {
	var err error
	if g.registry != nil {
		err = g.registry.Close()
	}
	return errors.Join(err, g.lock.Close())
}

// spawn hands f to Run, which owns its goroutine. The ctx that f gets ends with
// the gateway. It reports false when the gateway takes no more work.
func (g *Gateway) spawn(f func(context.Context)) bool {
	select {
	case g.work <- f:
		return true
	case <-g.closing:
		return false
	}
}

// Run serves until ctx is done. Then it takes no more connections, gives the
// open ones the grace time, and ends; it returns nil after such an end.
func (g *Gateway) Run(ctx context.Context) (err error) {
	defer func() { err = errors.Join(err, g.Close()) }()
	// Two lives: the edge, where clients come in, ends with ctx and its grace
	// time; the inside, which they need for that long, ends after it.
	inside, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	workers := make(chan struct{})
	go func() { defer close(workers); g.dispatch(inside) }()
	defer func() { end(); <-workers }()

	held := g.hold()
	parts, edge := errgroup.WithContext(ctx)
	err = g.listenAll(edge, parts)
	if err == nil {
		err = context.Cause(edge) // told to end, or a part has failed, before it was up
	}
	if err != nil {
		release(held)
		parts.Go(func() error { return ignoreStop(ctx, err) }) // ends the others
		return parts.Wait()
	}
	g.recover(inside, held)
	g.renewSSH(ctx)
	if g.cfg.Ready != nil {
		g.cfg.Ready()
	}
	g.log.InfoContext(ctx, "gateway ready", "dns", g.info().DNS, "ssh", g.info().SSH)
	return parts.Wait()
}

// ignoreStop is nil when the error is only that ctx has ended.
func ignoreStop(ctx context.Context, err error) error {
	if ctx.Err() != nil && errors.Is(err, context.Cause(ctx)) {
		return nil
	}
	return err
}

// dispatch runs the work that spawn hands in, and waits for all of it.
func (g *Gateway) dispatch(ctx context.Context) {
	var work sync.WaitGroup
	defer work.Wait()
	defer close(g.closing)
	for {
		select {
		case f := <-g.work:
			work.Go(func() { f(ctx) })
		case <-ctx.Done():
			return
		}
	}
}

func (g *Gateway) instanceOf(target string) *instance {
	if v, ok := g.instances.Load(target); ok {
		return v.(*instance)
	}
	return nil
}

// keep returns the keeper of a workspace.
func (g *Gateway) keep(name string) *keeper {
	k, _ := g.keepers.LoadOrStore(name, newKeeper(g, name))
	return k.(*keeper)
}

// note records something that happened. An event that cannot be stored is in
// the log at least.
func (g *Gateway) note(ctx context.Context, e workspaces.Event) {
	if err := g.registry.Note(e); err != nil {
		g.log.WarnContext(ctx, "event not recorded", "kind", string(e.Kind), "message", e.Reason, "err", err)
	}
}

// warn records what the gateway coped with: in the log, in info, as an event.
func (g *Gateway) warn(ctx context.Context, w api.Warning) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.warnLocked(ctx, w)
}

// warnLocked is warn with mu held.
func (g *Gateway) warnLocked(ctx context.Context, w api.Warning) {
	g.warnings = append(g.warnings, w)
	g.log.WarnContext(ctx, "gateway warning", "warning", w.Message, "hint", w.Hint)
	g.note(ctx, workspaces.Event{Kind: EventWarning, Reason: w.Message, Hint: w.Hint})
}
