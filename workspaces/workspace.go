// Package workspaces is the registry of what exists: workspaces, their targets
// and services, and the addresses they own. It is the truth; whoever else holds
// a copy follows the events.
//
// A Registry keeps its records in one bbolt file that one process owns. Every
// change is one transaction that writes the record and one [Event] together, and
// is on disk when the call returns. Reading never touches the disk.
//
// Errors come wrapped: test them with errors.Is and errors.As. Those a person can
// cure have a Hint() string.
package workspaces

import (
	"bytes"
	"net/netip"
	"slices"
	"time"
)

// Workspace is a thing with a hostname. Values handed out are copies: changing
// one changes nothing in the registry.
type Workspace struct {
	ID       string     `json:"id"` // random; never used again, also not for the same name
	Name     string     `json:"name"`
	Address  netip.Addr `json:"address"` // its loopback VIP
	Backend  netip.Addr `json:"backend"` // what programs of a directory target bind (HELIX_ADDR)
	Created  time.Time  `json:"created"`
	Active   string     `json:"active"` // name of the target that the hostname leads to
	Targets  []Target   `json:"targets"`
	Services []Service  `json:"services,omitempty"`
	Revision uint64     `json:"revision"` // Seq of the event that came with the last change
}

// Target returns the target of that name.
func (w Workspace) Target(name string) (Target, bool) {
	for _, t := range w.Targets {
		if t.Name == name {
			return t, true
		}
	}
	return Target{}, false
}

// ActiveTarget returns the target the hostname leads to.
func (w Workspace) ActiveTarget() Target {
	t, _ := w.Target(w.Active) // a record without its active target is not accepted
	return t
}

// Kind says where the work of a target runs.
type Kind string

// The kinds.
const (
	KindDir  Kind = "dir"  // a directory on the gateway's machine
	KindVM   Kind = "vm"   // a virtual machine on the gateway's machine
	KindHost Kind = "host" // a remote machine that joins
)

// Desired says what a person asked for last; State says what is.
type Desired string

// What a person can ask for.
const (
	DesiredStopped Desired = "stopped"
	DesiredRunning Desired = "running"
)

// DefaultTarget is the name of a target that was given none.
const DefaultTarget = "main"

// Target is one place where the work of a workspace runs.
type Target struct {
	Name       string    `json:"name"`
	ID         string    `json:"id"` // random; what an agent introduces itself with
	Kind       Kind      `json:"kind"`
	State      State     `json:"state"`
	LastKnown  State     `json:"last_known,omitempty"` // the state before Unknown, else ""
	Stage      Stage     `json:"stage,omitempty"`      // while Starting, and the one that failed while Failed
	Reason     string    `json:"reason,omitempty"`     // for people: why it is in this state
	Hint       string    `json:"hint,omitempty"`       // for people: what to try next
	Since      time.Time `json:"since"`                // when State last became another
	Generation uint64    `json:"generation"`           // counts starts; 0 = never started
	Desired    Desired   `json:"desired"`
	Dir        *DirSpec  `json:"dir,omitempty"` // set for KindDir
	VM         *VMSpec   `json:"vm,omitempty"`  // set for KindVM
	Token      *Token    `json:"token,omitempty"`
	Credential []byte    `json:"credential,omitempty"` // ed25519 public key of the paired agent
	LastSeen   time.Time `json:"last_seen,omitzero"`   // within SeenEvery of the agent's last sign of life
}

// DirSpec is a directory target. Path is absolute.
type DirSpec struct {
	Path string `json:"path"`
}

// VMSpec is a virtual machine. Zero sizes mean the launch plan's defaults.
type VMSpec struct {
	Image       string `json:"image"`                  // as the person named it
	ImageDigest string `json:"image_digest,omitempty"` // what that name meant at creation
	CPUs        int    `json:"cpus,omitempty"`
	MemoryMB    int    `json:"memory_mb,omitempty"`
	DiskGB      int    `json:"disk_gb,omitempty"`
	Policy      Policy `json:"policy"`
	Accel       Accel  `json:"accel,omitempty"`
	UUID        string `json:"uuid"` // made by Create; proves which machine a shim owns
}

// Policy names the egress policy of a virtual machine.
type Policy string

// The policies.
const (
	PolicyNone     Policy = "none"     // no network beyond the guest's own gateway
	PolicyInternet Policy = "internet" // public addresses only; what "" in a Spec becomes
)

// Accel says how a virtual machine's code is run.
type Accel string

// The choices. The empty one is hardware when it can be used, else emulation.
const (
	AccelKVM Accel = "kvm" // hardware or an error
	AccelTCG Accel = "tcg" // emulation
)

// Token is what is kept of the one-time secret that pairs an agent.
type Token struct {
	Hash    []byte    `json:"hash"` // HashToken of the secret
	Expires time.Time `json:"expires"`
	Used    time.Time `json:"used,omitzero"`     // zero = not yet
	UsedBy  []byte    `json:"used_by,omitempty"` // the public key it was used with
}

// Protocol says how the gateway speaks to a service.
type Protocol string

// The protocols.
const (
	ProtocolHTTP  Protocol = "http" // what "" becomes
	ProtocolHTTPS Protocol = "https"
	ProtocolH2C   Protocol = "h2c"
	ProtocolTLS   Protocol = "tls" // passed through untouched
	ProtocolTCP   Protocol = "tcp"
)

// Exposure says from where a service can be reached.
type Exposure string

// ExposureLocal is the gateway's own machine; "" becomes it.
const ExposureLocal Exposure = "local"

// Service is a port of a workspace with a name: https://NAME.WORKSPACE leads to it.
type Service struct {
	Name     string   `json:"name"` // a DNS label, never all digits
	Port     uint16   `json:"port"`
	Protocol Protocol `json:"protocol"`
	Exposure Exposure `json:"exposure"`
}

// clone copies w so deeply that nothing is shared with it.
func (w Workspace) clone() Workspace {
	w.Services = slices.Clone(w.Services)
	w.Targets = slices.Clone(w.Targets)
	for i, t := range w.Targets {
		w.Targets[i] = t.clone()
	}
	return w
}

func (t Target) clone() Target {
	t.Dir, t.VM, t.Token = copied(t.Dir), copied(t.VM), copied(t.Token)
	if t.Token != nil {
		t.Token.Hash, t.Token.UsedBy = bytes.Clone(t.Token.Hash), bytes.Clone(t.Token.UsedBy)
	}
	t.Credential = bytes.Clone(t.Credential)
	return t
}

func copied[T any](p *T) *T {
	if p == nil {
		return nil
	}
	v := *p
	return &v
}
