package workspaces

import (
	"crypto/rand"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"

	"github.com/google/uuid"
	"go.etcd.io/bbolt"
)

// Spec is what a workspace is made from.
type Spec struct {
	Name     string
	Targets  []TargetSpec // one or more; the first becomes the active one
	Services []Service
}

// TargetSpec is what a target is made from.
type TargetSpec struct {
	Name    string // "" is DefaultTarget
	Kind    Kind
	Dir     *DirSpec // for KindDir
	VM      *VMSpec  // for KindVM; UUID is made by Create
	Desired Desired  // "" is DesiredStopped
}

// Create makes a workspace with all its targets Stopped. It reports every fault
// of the spec at once in an *InvalidError. Other errors: ErrExists, ErrBroken
// (the name has a record that cannot be read), ErrNoAddress.
func (r *Registry) Create(s Spec) (Workspace, error) {
	w, err := newWorkspace(s)
	if err != nil {
		return Workspace{}, fmt.Errorf("create workspace %q: %w", s.Name, err)
	}
	made, err := r.commit(s.Name, func(tx *bbolt.Tx, e *Event) (*Workspace, error) {
		if err := r.free(s.Name); err != nil {
			return nil, err
		}
		if w.Address, err = r.vips.take(tx, r.taken); err != nil {
			return nil, err
		}
		if w.Backend, err = r.backends.take(tx, r.taken); err != nil {
			return nil, err
		}
		w.Created, e.Kind, e.ID = e.Time, EventCreated, w.ID
		e.Target, e.State = w.Active, Stopped
		for i := range w.Targets {
			w.Targets[i].Since = e.Time
		}
		return &w, nil
	})
	if err != nil {
		return Workspace{}, fmt.Errorf("create workspace %q: %w", s.Name, err)
	}
	return made.clone(), nil
}

// free returns nil when no record has that name.
func (r *Registry) free(name string) error {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if _, ok := r.byName[name]; ok {
		return ErrExists
	}
	if err, ok := r.broken[name]; ok {
		return fmt.Errorf("%w: %w", ErrBroken, err)
	}
	return nil
}

// taken reports addresses that a pool must pass over.
func (r *Registry) taken(addr netip.Addr) bool {
	_, owned := r.Owner(addr)
	return owned || r.reserved[addr]
}

// newWorkspace makes the record of s without its addresses and times.
func newWorkspace(s Spec) (Workspace, error) {
	var faults []error
	if err := CheckName(s.Name); err != nil {
		faults = append(faults, err)
	}
	services, serviceFaults := checkServices(s.Services)
	faults = append(faults, serviceFaults...)
	if len(s.Targets) == 0 {
		faults = append(faults, errors.New("no target: give an image or a directory"))
	}
	w := Workspace{ID: newID(), Name: s.Name, Services: services}
	names := make(map[string]bool)
	for _, spec := range s.Targets {
		t, targetFaults := newTarget(spec)
		if names[t.Name] {
			targetFaults = append(targetFaults, errors.New("the name is given twice"))
		}
		names[t.Name] = true
		for _, f := range targetFaults {
			faults = append(faults, fmt.Errorf("target %q: %w", t.Name, f))
		}
		w.Targets = append(w.Targets, t)
	}
	if len(faults) > 0 {
		return Workspace{}, &InvalidError{Faults: faults}
	}
	w.Active = w.Targets[0].Name
	return w, nil
}

func newTarget(s TargetSpec) (Target, []error) {
	t := Target{
		Name: s.Name, ID: newID(), Kind: s.Kind, State: Stopped, Desired: s.Desired,
		Dir: copied(s.Dir), VM: copied(s.VM),
	}
	var faults []error
	if t.Name == "" {
		t.Name = DefaultTarget
	}
	if reason := labelFault(t.Name); reason != "" {
		faults = append(faults, errors.New("name "+reason))
	}
	switch t.Desired {
	case "":
		t.Desired = DesiredStopped
	case DesiredStopped, DesiredRunning:
	default:
		faults = append(faults, fmt.Errorf("desired state %q: not %s or %s", t.Desired, DesiredRunning, DesiredStopped))
	}
	if (t.Dir != nil) != (t.Kind == KindDir) || (t.VM != nil) != (t.Kind == KindVM) {
		faults = append(faults, fmt.Errorf("kind %q does not go with what is given", t.Kind))
	}
	switch t.Kind {
	case KindDir:
		if t.Dir != nil && (!filepath.IsAbs(t.Dir.Path) || strings.ContainsRune(t.Dir.Path, 0)) {
			faults = append(faults, fmt.Errorf("directory %q: not an absolute path", t.Dir.Path))
		}
	case KindVM:
		if t.VM != nil {
			faults = append(faults, checkVM(t.VM)...)
			t.VM.UUID = uuid.NewString()
		}
	case KindHost:
	default:
		faults = append(faults, fmt.Errorf("kind %q: not %s, %s or %s", t.Kind, KindDir, KindVM, KindHost))
	}
	return t, faults
}

// checkVM finds what no launch plan could be made from, and fills in the policy.
func checkVM(v *VMSpec) []error {
	var faults []error
	if v.Image == "" {
		faults = append(faults, errors.New("image: none given"))
	}
	for _, size := range []struct {
		key      string
		value    int
		min, max int
	}{
		{"cpus", v.CPUs, 1, 512},
		{"memory_mb", v.MemoryMB, 64, 16 << 20},
		{"disk_gb", v.DiskGB, 1, 64 << 10},
	} {
		if size.value != 0 && (size.value < size.min || size.value > size.max) {
			faults = append(faults, fmt.Errorf("%s %d: not between %d and %d", size.key, size.value, size.min, size.max))
		}
	}
	switch v.Accel {
	case "", AccelKVM, AccelTCG:
	case "auto":
		v.Accel = ""
	default:
		faults = append(faults, fmt.Errorf("accel %q: not auto, %s or %s", v.Accel, AccelKVM, AccelTCG))
	}
	switch v.Policy {
	case "":
		v.Policy = PolicyInternet
	case PolicyNone, PolicyInternet:
	default:
		faults = append(faults, fmt.Errorf("policy %q: not %s or %s", v.Policy, PolicyNone, PolicyInternet))
	}
	return faults
}

// checkServices returns services with defaults filled in, and every fault.
func checkServices(services []Service) ([]Service, []error) {
	var checked []Service
	var faults []error
	names := make(map[string]bool)
	for _, s := range services {
		fault := func(format string, args ...any) {
			faults = append(faults, fmt.Errorf("service %q: %w", s.Name, fmt.Errorf(format, args...)))
		}
		if reason := labelFault(s.Name); reason != "" {
			fault("name %s", reason)
		}
		if names[s.Name] {
			fault("the name is given twice")
		}
		names[s.Name] = true
		if s.Port == 0 {
			fault("port 0")
		}
		switch s.Protocol {
		case "":
			s.Protocol = ProtocolHTTP
		case ProtocolHTTP, ProtocolHTTPS, ProtocolH2C, ProtocolTLS, ProtocolTCP:
		default:
			fault("protocol %q: not http, https, h2c, tls or tcp", s.Protocol)
		}
		switch s.Exposure {
		case "":
			s.Exposure = ExposureLocal
		case ExposureLocal:
		default:
			fault("exposure %q: not %s", s.Exposure, ExposureLocal)
		}
		checked = append(checked, s)
	}
	return checked, faults
}

// newID returns a random name of 130 bits in lower case.
func newID() string { return strings.ToLower(rand.Text()) }
