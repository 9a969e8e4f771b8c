package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"helix.local/helix/agent/guest"
	"helix.local/helix/agent/process"
	"helix.local/helix/agent/session"
	"helix.local/helix/agent/wire"
	"helix.local/helix/tunnel"
)

const (
	guestWorkspace = "/workspace"
	guestUser      = "helix"
	bootWait       = 30 * time.Second // for the boot parameters, from the first module on
	guestGrace     = 3 * time.Second  // for programs between SIGTERM and SIGKILL
)

// machine is the guest while it comes up and runs.
type machine struct {
	version string
	began   time.Time
	console io.Writer
	log     *slog.Logger

	modules chan struct{} // closed when all are loaded
	down    chan int      // how to go down, once somebody says so

	mu        sync.Mutex
	network   stage
	workspace stage
	lease     guest.Lease
}

// stage is the outcome of a step that runs beside the others.
type stage struct {
	done bool
	err  error
}

var errPending = errors.New("not done yet")

func (s stage) check() error {
	if !s.done {
		return errPending
	}
	return s.err
}

// RunGuest is the first process of a guest: it brings the machine up, serves
// it, and takes it down. It says one line a stage on console and returns only
// if the machine could not be ended.
func RunGuest(version string, console io.Writer) error {
	m := &machine{version: version, began: time.Now(), console: console, modules: make(chan struct{}), down: make(chan int, 1)}
	m.log = slog.New(slog.NewTextHandler(console, &slog.HandlerOptions{Level: slog.LevelWarn}))
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var work sync.WaitGroup
	work.Go(func() { m.signals(ctx) })
	m.report("mounts", errors.Join(guest.Mount(), guest.RaiseLimits()))
	work.Go(func() {
		if err := m.bringUp(ctx, &work); err != nil {
			m.say("start failed: %v", err)
		}
	})
	how := <-m.down
	m.say("going down")
	if err := guest.EndPrograms(ctx, guestGrace); err != nil {
		m.say("programs: %v", err)
	}
	cancel()
	m.settle(&work)
	m.say("down")
	return guest.Down(guestWorkspace, how) //nolint:wrapcheck // says what
}

// settle waits for the agent's own work, but not for ever: a driver that hangs
// must not keep the machine up.
func (m *machine) settle(work *sync.WaitGroup) {
	done := make(chan struct{})
	go func() { work.Wait(); close(done) }()
	late := time.NewTimer(guestGrace)
	defer late.Stop()
	select {
	case <-done:
	case <-late.C:
		m.say("going down with work undone")
	}
}

// say writes one line to the console, with the time since the start. Nothing secret goes here: the log of the
// console is kept on the host.
func (m *machine) say(format string, args ...any) {
	line := fmt.Sprintf(format, args...)
	_, _ = fmt.Fprintf(m.console, "helix-agent: %s (%v)\n", line, time.Since(m.began).Round(time.Millisecond)) // nobody to tell
}

func (m *machine) report(stage string, err error) {
	if err != nil {
		m.say("%s: %s", stage, strings.ReplaceAll(err.Error(), "\n", "; "))
		return
	}
	m.say("%s ok", stage)
}

// bringUp starts what makes the guest reachable first: the control link needs
// only its driver and the boot parameters. Disk and network follow at the same
// time as their drivers.
func (m *machine) bringUp(ctx context.Context, work *sync.WaitGroup) error {
	loaded := make(chan struct{}, 1) // wakes who waits for a driver
	work.Go(func() {
		err := guest.LoadModules(guest.ModuleList, func(string) {
			select {
			case loaded <- struct{}{}:
			default:
			}
		})
		m.report("modules", err)
		close(m.modules)
	})
	boot, err := m.readBoot(ctx, loaded)
	if err != nil {
		return err
	}
	m.say("boot parameters of %s, start %d", boot.Workspace, boot.Generation)
	// The kernel of a machine without a random instruction gathers for more than
	// a second before it gives out keys; our key cannot wait that long.
	if err := guest.SeedRandom("/dev/urandom", []byte(boot.Token)); err != nil {
		m.say("random: %v", err)
	}
	reaper := process.NewReaper()
	t, err := m.target(boot, reaper)
	if err != nil {
		return err
	}
	k, err := newKeeper(boot, m.version, t.handle, m.log)
	if err != nil {
		return err
	}
	k.onSession = m.onSession
	work.Go(func() { k.keep(ctx, wire.LinkSerial, dialSerial) })
	work.Go(func() { m.must(ctx, "reaper", reaper.Run) })
	work.Go(func() { m.must(ctx, "api", t.serveAPI) })
	work.Go(func() { m.setUp(ctx, boot, k) })
	work.Go(func() {
		<-m.modules
		m.must(ctx, "power button", func(ctx context.Context) error {
			return guest.PowerButton(ctx, func() { m.goDown(guest.PowerOff) })
		})
	})
	work.Go(func() { // ends the ssh server's programs with the machine
		<-ctx.Done()
		m.must(ctx, "ssh", func(context.Context) error { return t.ssh.Close(guestGrace) })
	})
	return nil
}

// must runs a part that should not fail; a machine with a broken part still
// serves the others.
func (m *machine) must(ctx context.Context, part string, run func(context.Context) error) {
	if err := run(ctx); err != nil {
		m.say("%s: %v", part, err)
	}
}

// readBoot waits for the driver that shows the boot parameters.
func (m *machine) readBoot(ctx context.Context, loaded <-chan struct{}) (wire.Boot, error) {
	late := time.NewTimer(bootWait)
	defer late.Stop()
	for modules := (<-chan struct{})(m.modules); ; {
		text, err := os.ReadFile(guest.BootFile)
		if err == nil {
			return ParseBoot(text)
		}
		select {
		case <-loaded:
		case <-modules:
			modules = nil // one more look, then only time helps
		case <-late.C:
			return wire.Boot{}, fmt.Errorf("read boot parameters: %w", err)
		case <-ctx.Done():
			return wire.Boot{}, fmt.Errorf("read boot parameters: %w", ctx.Err())
		}
	}
}

func (m *machine) target(boot wire.Boot, reaper *process.Reaper) (*target, error) {
	boot.Dir = guestWorkspace
	program, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find the agent's program: %w", err)
	}
	return newTarget(settings{
		boot: boot, version: m.version, log: m.log, reaper: reaper, program: program,
		accounts: guestAccount, owner: defaultAccount(),
		env:    []string{"LANG=C.UTF-8", "HELIX_WORKSPACE=" + boot.Workspace},
		checks: m.checks(boot),
		setClock: func(now time.Time) error {
			_, _, err := guest.SetClock(now)
			return err //nolint:wrapcheck // says what
		},
		shutdown: func() { m.goDown(guest.PowerOff) },
	})
}

func (m *machine) checks(boot wire.Boot) []check {
	return []check{
		{wire.CheckRoot, func() error { return writable("/") }},
		{wire.CheckWorkspace, func() error {
			m.mu.Lock()
			err := m.workspace.check()
			m.mu.Unlock()
			if err != nil {
				return err
			}
			return writable(guestWorkspace)
		}},
		{wire.CheckNetwork, func() error {
			m.mu.Lock()
			err, lease := m.network.check(), m.lease
			m.mu.Unlock()
			if errors.Is(err, guest.ErrNoNetwork) && boot.Link == "" {
				return nil // none was planned
			}
			if err != nil {
				return err
			}
			return guest.CheckNetwork(lease) //nolint:wrapcheck // says what
		}},
	}
}

// guestAccount gives root to who asks for it and the ordinary user to everybody else.
func guestAccount(login string) (session.Account, error) {
	if login == "root" {
		a, err := session.Lookup("/etc", "root")
		if err != nil {
			return session.Account{Name: "root", Home: "/root", Shell: "/bin/sh", Own: true}, nil //nolint:nilerr // an image without accounts
		}
		return a, nil
	}
	return defaultAccount(), nil
}

func defaultAccount() session.Account {
	a, err := session.Lookup("/etc", guestUser)
	if err != nil { // an image that lacks it
		return session.Account{Name: guestUser, UID: 1000, GID: 1000, Home: guestWorkspace, Shell: "/bin/sh"}
	}
	return a
}

// setUp does what the control link need not wait for. The fast link comes with
// the network.
func (m *machine) setUp(ctx context.Context, boot wire.Boot, k *keeper) {
	var work sync.WaitGroup
	defer work.Wait()
	work.Go(func() {
		m.report("host name", errors.Join(guest.SetHostname(boot.Workspace, boot.Zone, "/etc"), guest.Loopback()))
	})
	work.Go(func() {
		m.driver(ctx, guest.DiskDevice)
		owner := defaultAccount()
		mounted, err := guest.MountWorkspace(ctx, guestWorkspace, int(owner.UID), int(owner.GID))
		m.mu.Lock()
		m.workspace = stage{true, err}
		m.mu.Unlock()
		if err == nil && !mounted {
			m.say("workspace without a disk")
			return
		}
		m.report("workspace", err)
	})
	m.driver(ctx, guest.NetDevice)
	lease, err := guest.Configure(ctx, "/etc")
	m.mu.Lock()
	m.network, m.lease = stage{true, err}, lease
	m.mu.Unlock()
	if err != nil {
		m.report("network", err)
		return
	}
	m.say("network %s", lease.Address)
	if boot.Link != "" {
		k.keep(ctx, wire.LinkTCP, func(ctx context.Context) (net.Conn, error) {
			dialer := net.Dialer{Timeout: 10 * time.Second}
			return dialer.DialContext(ctx, "tcp", boot.Link) //nolint:wrapcheck // names the address
		})
	}
}

// driver waits until device is there or all drivers are loaded: what is not
// there then will not come.
func (m *machine) driver(ctx context.Context, device string) {
	_ = guest.Await(ctx, device, m.modules) // the step that needs it says so
}

// dialSerial waits for the gateway on the control port.
func dialSerial(ctx context.Context) (net.Conn, error) {
	port, err := guest.OpenControl(ctx)
	if err != nil {
		return nil, err //nolint:wrapcheck // says what
	}
	conn, err := tunnel.OpenSerialAgent(ctx, port)
	if err != nil {
		return nil, errors.Join(err, ignoreClosed(port.Close()))
	}
	return conn, nil
}

// onSession takes the time from the gateway: the machine's own clock is behind
// after a pause.
func (m *machine) onSession(s *tunnel.Session) {
	off, stepped, err := guest.SetClock(s.GatewayTime())
	switch {
	case err != nil:
		m.say("clock: %v", err)
	case stepped:
		m.say("link %s, clock stepped by %v", s.Link(), off.Round(time.Millisecond))
	default:
		m.say("link %s", s.Link())
	}
}

// signals are how init is told things: by the kernel, and by the programs
// halt, poweroff and reboot.
func (m *machine) signals(ctx context.Context) {
	told := make(chan os.Signal, 4)
	signal.Notify(told, unix.SIGTERM, unix.SIGINT, unix.SIGPWR, unix.SIGUSR1, unix.SIGUSR2)
	defer signal.Stop(told)
	for {
		select {
		case <-ctx.Done():
			return
		case s := <-told:
			if s == syscall.SIGTERM || s == syscall.SIGINT {
				m.goDown(guest.Restart)
			} else {
				m.goDown(guest.PowerOff)
			}
		}
	}
}

func (m *machine) goDown(how int) {
	select {
	case m.down <- how:
	default: // it is going down
	}
}
