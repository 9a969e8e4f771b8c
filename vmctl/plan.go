package vmctl

import (
	"errors"
	"fmt"
	"net"
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/google/uuid"

	"helix.local/helix/vmctl/guestnet"
)

// PlanVersion is the version of the plan format. A newer one is refused.
const PlanVersion = 1

// maxSocketPath is the longest path of a unix socket on Linux; macOS has 103.
const (
	maxSocketPath       = 107
	maxSocketPathDarwin = 103
)

// Plan is everything needed to start one machine. It holds no secret and may be
// shown.
type Plan struct {
	Version    int       `json:"version"`
	Name       string    `json:"name"`
	UUID       string    `json:"uuid"`
	Generation uint64    `json:"generation"`
	RunDir     string    `json:"run_dir"`
	Machine    string    `json:"machine"` // QEMU machine type
	Accel      string    `json:"accel"`
	Warning    string    `json:"warning,omitempty"` // for the person who starts it, once
	Image      string    `json:"image"`             // digest
	QEMU       string    `json:"qemu"`
	Args       []string  `json:"args"`
	ACPI       bool      `json:"acpi"` // the power button works
	Files      Files     `json:"files"`
	Sockets    Sockets   `json:"sockets"`
	Disk       Disk      `json:"disk"`
	Network    Network   `json:"network"`
	Steps      []Limit   `json:"steps"` // of a start, in order
	Stop       []Limit   `json:"stop"`  // phases of a stop, in order
	Console    LogLimits `json:"console"`
}

// Files are paths in the run folder.
type Files struct {
	Plan    string `json:"plan"`
	Boot    string `json:"boot"` // 0600, removed as soon as QEMU has read it
	Exit    string `json:"exit"`
	Lock    string `json:"lock"`
	ShimLog string `json:"shim_log"`
	Console string `json:"console"`
}

// Sockets are paths of unix sockets. The shim listens on Shim, Net and Console,
// QEMU on QMP and Serial, and the gateway on Link.
type Sockets struct {
	Shim    string `json:"shim"`
	QMP     string `json:"qmp"`
	Serial  string `json:"serial"`
	Net     string `json:"net"`
	Console string `json:"console"`
	Link    string `json:"link,omitempty"`
}

// Disk is the workspace disk. It is made once and kept across starts.
type Disk struct {
	Path  string `json:"path"`
	Bytes int64  `json:"bytes"`
	Label string `json:"label"`
	Make  string `json:"make"` // path of mke2fs
}

// Network is what must be found when the network is read back.
type Network struct {
	Policy  guestnet.Policy `json:"policy"`
	NIC     string          `json:"nic"`    // QEMU's identifier of the card
	NetDev  string          `json:"netdev"` // and of what it is attached to
	MAC     string          `json:"mac"`
	MTU     int             `json:"mtu"`
	Gateway string          `json:"gateway"`
	Guest   string          `json:"guest"`
}

// Limit is the time one step or phase may take.
type Limit struct {
	Name    string        `json:"name"`
	Timeout time.Duration `json:"timeout"` // nanoseconds
}

// LogLimits bound the console log: one file of Bytes, and Keep older ones.
type LogLimits struct {
	Bytes int64 `json:"bytes"`
	Keep  int   `json:"keep"`
}

// NewPlan decides how m is started on h. It reads and changes nothing.
func NewPlan(m Machine, h Host) (Plan, error) {
	m, err := m.complete(h)
	if err != nil {
		return Plan{}, fmt.Errorf("plan machine %q: %w", m.Name, err)
	}
	accel, warning, err := chooseAccel(m.Accel, h)
	if err != nil {
		return Plan{}, fmt.Errorf("plan machine %q: %w", m.Name, err)
	}
	if m.CPUs == 0 {
		m.CPUs = min(2, max(h.CPUs, 1))
		if accel == "tcg" {
			m.CPUs = 1
		}
	}
	join := path.Join
	if h.OS == "windows" {
		join = func(parts ...string) string { return strings.Join(parts, `\`) }
	}
	in := func(name string) string { return join(m.RunDir, name) }
	scale := time.Duration(1)
	if accel == "tcg" {
		scale = 4
	}
	limit := func(name string, d time.Duration) Limit { return Limit{name, d * scale} }
	p := Plan{
		Version: PlanVersion, Name: m.Name, UUID: m.UUID, Generation: m.Generation, RunDir: m.RunDir,
		Accel: accel, Warning: warning, Image: m.Image.Digest, QEMU: h.QEMU, ACPI: true,
		Files: Files{
			Plan: in("plan.json"), Boot: in("boot.json"), Exit: in("exit.json"),
			Lock: in("shim.lock"), ShimLog: in("shim.log"), Console: in("console.log"),
		},
		Sockets: Sockets{
			Shim: in("shim.sock"), QMP: in("qmp.sock"), Serial: in("serial.sock"),
			Net: in("net.sock"), Console: in("console.sock"), Link: m.LinkSocket,
		},
		Disk: Disk{Path: in("workspace.img"), Bytes: int64(m.DiskGB) << 30, Label: "helix-ws", Make: h.Disk},
		Network: Network{
			Policy: m.Policy, NIC: "nic0", NetDev: "net0", MAC: macFor(m.UUID), MTU: guestnet.MTU,
			Gateway: guestnet.GatewayAddr, Guest: guestnet.GuestAddr,
		},
		Steps: []Limit{
			limit(string(StepPrepare), 5*time.Second), limit(string(StepDisk), 15*time.Second), limit(string(StepShim), 5*time.Second),
			limit(string(StepQEMU), 10*time.Second), limit(string(StepNetwork), 5*time.Second),
		},
		Stop: []Limit{
			limit(string(PhaseAgent), 10*time.Second), limit(string(PhaseACPI), 5*time.Second),
			limit(string(PhaseQuit), 3*time.Second), limit(string(PhaseKill), 5*time.Second),
		},
		Console: LogLimits{Bytes: 1 << 20, Keep: 2},
	}
	if err := p.checkSockets(h.OS); err != nil {
		return Plan{}, fmt.Errorf("plan machine %q: %w", m.Name, err)
	}
	p.Machine, p.Args = qemuArgs(m, h, p)
	return p, nil
}

// complete fills in defaults and reports every fault at once.
func (m Machine) complete(h Host) (Machine, error) {
	var errs []error
	if m.MemoryMB == 0 {
		m.MemoryMB = 1024
	}
	if m.DiskGB == 0 {
		m.DiskGB = 8
	}
	if m.Policy == "" {
		m.Policy = guestnet.PolicyInternet
	}
	if m.Name == "" || strings.ContainsAny(m.Name, ",/\\ \x00") {
		errs = append(errs, fmt.Errorf("name %q is not a DNS label", m.Name))
	}
	if _, err := uuid.Parse(m.UUID); err != nil {
		errs = append(errs, fmt.Errorf("uuid %q: %w", m.UUID, err))
	}
	if !filepath.IsAbs(m.RunDir) && h.OS != "windows" {
		errs = append(errs, fmt.Errorf("run folder %q is not absolute", m.RunDir))
	}
	if m.CPUs < 0 || m.CPUs > 255 {
		errs = append(errs, fmt.Errorf("%d processors are not possible", m.CPUs))
	}
	if m.MemoryMB < 128 {
		errs = append(errs, fmt.Errorf("%d MB of memory are too few, 128 are needed", m.MemoryMB))
	}
	if m.DiskGB < 0 {
		errs = append(errs, fmt.Errorf("a disk of %d GB is not possible", m.DiskGB))
	}
	errs = append(errs, m.Policy.Validate())
	if m.Image.Kernel == "" || m.Image.Initramfs == "" {
		errs = append(errs, errors.New("the image has no kernel or no initramfs"))
	}
	if h.QEMU == "" {
		errs = append(errs, missingQEMU(h))
	}
	return m, errors.Join(errs...)
}

func missingQEMU(h Host) error {
	cure := "install QEMU: apt-get install qemu-system-x86"
	switch {
	case h.OS == "darwin":
		cure = "install QEMU: brew install qemu"
	case h.OS == "windows":
		cure = "install QEMU: winget install SoftwareFreedomConservancy.QEMU"
	case h.Arch == "arm64":
		cure = "install QEMU: apt-get install qemu-system-arm"
	}
	return &CureError{fmt.Errorf("%s is not installed", qemuName(h.Arch)), cure}
}

// chooseAccel picks the accelerator, with a warning when it is not the one that
// everybody would want.
func chooseAccel(want Accel, h Host) (accel, warning string, err error) {
	hardware := map[string]string{"linux": "kvm", "darwin": "hvf", "windows": "whpx"}[h.OS]
	switch {
	case want == AccelTCG:
		return "tcg", "", nil
	case want != AccelAuto && want != AccelKVM:
		return "", "", fmt.Errorf("accelerator %q is not known", want)
	case h.KVM.Usable && hardware != "":
		return hardware, "", nil
	case want == AccelKVM:
		return "", "", &CureError{fmt.Errorf("hardware acceleration was asked for, but %s", h.KVM.Reason), h.KVM.Cure}
	}
	warning = "no hardware acceleration: " + h.KVM.Reason + "; the machine is emulated and several times slower"
	if h.KVM.Cure != "" {
		warning += " (" + h.KVM.Cure + ")"
	}
	return "tcg", warning, nil
}

func (p Plan) checkSockets(os string) error {
	longest := maxSocketPath
	if os == "darwin" {
		longest = maxSocketPathDarwin
	}
	for _, s := range []string{p.Sockets.Console, p.Sockets.Link} { // Console is the longest of ours
		if len(s) > longest {
			return &CureError{
				fmt.Errorf("socket path %s has %d bytes, and the system allows %d", s, len(s), longest),
				"choose a state folder with a shorter path",
			}
		}
	}
	return nil
}

// macFor derives a locally administered address from the UUID, so that a guest
// keeps its address and two machines never share one.
func macFor(id string) string {
	u, err := uuid.Parse(id)
	if err != nil {
		return ""
	}
	return net.HardwareAddr{0x52, 0x48, u[12], u[13], u[14], u[15]}.String()
}

// limitOf returns the time for a step or phase.
func limitOf(limits []Limit, name string) time.Duration {
	for _, l := range limits {
		if l.Name == name {
			return l.Timeout
		}
	}
	return 10 * time.Second
}
