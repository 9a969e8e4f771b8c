package workspaces

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net/netip"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"
)

// lockWait is how long Open waits for another process to let go of the file. A
// gateway that is just ending needs no more.
const lockWait = 250 * time.Millisecond

var (
	workspacesBucket = []byte("workspaces") // name -> record of a Workspace
	eventsBucket     = []byte("events")     // Seq -> record of an Event; the bucket's sequence is the last Seq
)

// Options are the choices of Open. The zero value is what the gateway runs with.
type Options struct {
	Log      *slog.Logger     // nil discards
	Clock    func() time.Time // nil is time.Now
	Range    netip.Prefix     // IPv4 range of the VIPs; zero is 127.88.0.0/16
	Backends netip.Prefix     // IPv4 range of the Backend addresses; zero is 127.89.0.0/16
	Reserved []netip.Addr     // never handed out
}

// withDefaults fills in what is zero and refuses ranges that cannot serve.
func (o Options) withDefaults() (Options, error) {
	o.Log = cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	if o.Clock == nil {
		o.Clock = time.Now
	}
	if o.Range == (netip.Prefix{}) {
		o.Range = netip.PrefixFrom(netip.AddrFrom4([4]byte{127, 88, 0, 0}), 16)
	}
	if o.Backends == (netip.Prefix{}) {
		o.Backends = netip.PrefixFrom(netip.AddrFrom4([4]byte{127, 89, 0, 0}), 16)
	}
	var faults []error
	for key, p := range map[string]netip.Prefix{"range": o.Range, "backends": o.Backends} {
		if !p.IsValid() || !p.Addr().Is4() || p.Bits() > 29 || p.Masked() != p {
			faults = append(faults, fmt.Errorf("%s %s: not the first address of an IPv4 network of 8 or more", key, p))
		}
	}
	if len(faults) == 0 && o.Range.Overlaps(o.Backends) {
		faults = append(faults, fmt.Errorf("range %s overlaps backends %s", o.Range, o.Backends))
	}
	if len(faults) > 0 {
		return o, &InvalidError{Faults: faults}
	}
	return o, nil
}

// Registry is the open registry. Its methods may be called concurrently.
type Registry struct {
	db       *bbolt.DB
	log      *slog.Logger
	clock    func() time.Time
	vips     pool
	backends pool
	reserved map[netip.Addr]bool

	// write serialises changes. It is held across the transaction, so that memory
	// follows the order of commits; readers never wait for it.
	write sync.Mutex

	mu      sync.RWMutex
	byName  map[string]*Workspace // values are never changed, only replaced
	byAddr  map[netip.Addr]string
	byID    map[string]string // target ID -> workspace name
	broken  map[string]error
	ring    []Event // the last EventsKept at most, without gaps
	seq     uint64
	changed chan struct{} // closed and replaced with each event and by Close
	closed  bool
}

// Open opens the registry at path, or makes an empty one. It fails with
// ErrLocked while another process has it and with a *CorruptError when the file
// is damaged as a whole; single bad records are listed by Broken.
func Open(path string, o Options) (*Registry, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("open registry %s: %w", path, err)
	}
	r := &Registry{
		log: o.Log, clock: o.Clock,
		vips:     pool{name: "vip", network: o.Range},
		backends: pool{name: "backend", network: o.Backends},
		reserved: make(map[netip.Addr]bool),
		byName:   make(map[string]*Workspace),
		byAddr:   make(map[netip.Addr]string),
		byID:     make(map[string]string),
		broken:   make(map[string]error),
		changed:  make(chan struct{}),
	}
	for _, a := range o.Reserved {
		r.reserved[a] = true
	}
	if err := r.open(path); err != nil {
		return nil, err
	}
	for name, err := range r.broken {
		r.log.Error("record cannot be read", "workspace", name, "err", err)
	}
	return r, nil
}

// open opens the file and loads it. A damaged bbolt file shows itself as an
// error, as a panic inside bbolt or, when it is shorter than its pages say, as a
// memory fault: all three are bad input here and not bugs. After a panic the file
// stays mapped and locked until the process ends; bbolt's Close would touch the
// damaged pages again.
func (r *Registry) open(path string) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			// What bbolt stumbled over says nothing to a person.
			r.log.Debug("registry not opened", "path", path, "panic", fmt.Sprint(p))
			err = &CorruptError{Path: path, Err: errors.New("the file was cut short or overwritten")}
		}
	}()
	r.db, err = bbolt.Open(path, 0o600, &bbolt.Options{Timeout: lockWait, FreelistType: bbolt.FreelistMapType})
	var pathErr *fs.PathError
	switch {
	case errors.Is(err, berrors.ErrTimeout):
		return fmt.Errorf("open registry %s: %w", path, ErrLocked)
	case errors.As(err, &pathErr):
		return fmt.Errorf("open registry: %w", err)
	case err != nil:
		return &CorruptError{Path: path, Err: err}
	}
	if err := r.db.Update(r.prepare); err != nil {
		return fmt.Errorf("open registry %s: %w", path, errors.Join(err, r.db.Close()))
	}
	if err := r.db.View(r.load); err != nil {
		return fmt.Errorf("open registry %s: %w", path, errors.Join(err, r.db.Close()))
	}
	return nil
}

func (r *Registry) prepare(tx *bbolt.Tx) error {
	for _, name := range [][]byte{workspacesBucket, eventsBucket, addressesBucket, []byte(r.vips.name), []byte(r.backends.name)} {
		if _, err := tx.CreateBucketIfNotExists(name); err != nil {
			return fmt.Errorf("make bucket %s: %w", name, err)
		}
	}
	return nil
}

func (r *Registry) load(tx *bbolt.Tx) error {
	err := tx.Bucket(workspacesBucket).ForEach(func(key, value []byte) error {
		w, err := decodeWorkspace(string(key), value)
		if err != nil {
			r.broken[string(key)] = err
			return nil
		}
		r.index(w)
		return nil
	})
	if err != nil {
		return fmt.Errorf("read records: %w", err)
	}
	events := tx.Bucket(eventsBucket)
	r.seq = events.Sequence()
	return events.ForEach(func(key, value []byte) error {
		var e Event
		if err := decodeRecord(value, &e); err != nil {
			r.log.Warn("event cannot be read", "err", err)
			r.ring = nil // the ring must have no gap: what is before this one is lost as well
			return nil
		}
		r.ring = append(r.ring, e)
		return nil
	})
}

// Close lets the file go and ends all watches. It waits for a change under way.
func (r *Registry) Close() error {
	r.write.Lock()
	defer r.write.Unlock()
	r.mu.Lock()
	already := r.closed
	if r.closed = true; !already {
		close(r.changed)
	}
	r.mu.Unlock()
	if already {
		return nil
	}
	if err := r.db.Close(); err != nil {
		return fmt.Errorf("close registry: %w", err)
	}
	return nil
}

// index makes w what readers see. It takes r.mu held, or a registry that nobody
// else has yet.
func (r *Registry) index(w *Workspace) {
	r.unindex(w.Name)
	r.byName[w.Name] = w
	r.byAddr[w.Address], r.byAddr[w.Backend] = w.Name, w.Name
	for _, t := range w.Targets {
		r.byID[t.ID] = w.Name
	}
}

func (r *Registry) unindex(name string) {
	w, ok := r.byName[name]
	if !ok {
		return
	}
	delete(r.byName, name)
	delete(r.byAddr, w.Address)
	delete(r.byAddr, w.Backend)
	for _, t := range w.Targets {
		delete(r.byID, t.ID)
	}
}

// Get returns the workspace of that name. Errors: *NotFoundError, ErrBroken.
func (r *Registry) Get(name string) (Workspace, error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	w, err := r.findLocked(name)
	if err != nil {
		return Workspace{}, err
	}
	return w.clone(), nil
}

// findLocked takes r.mu held.
func (r *Registry) findLocked(name string) (*Workspace, error) {
	if w, ok := r.byName[name]; ok {
		return w, nil
	}
	if err, ok := r.broken[name]; ok {
		return nil, fmt.Errorf("workspace %q: %w: %w", name, ErrBroken, err)
	}
	return nil, &NotFoundError{What: "workspace", Name: name, Nearest: nearest(name, maps.Keys(r.byName))}
}

// List returns all workspaces, sorted by name. To follow what comes after, take
// Seq first and watch from there.
func (r *Registry) List() []Workspace {
	r.mu.RLock()
	all := slices.Collect(maps.Values(r.byName))
	r.mu.RUnlock()
	slices.SortFunc(all, func(a, b *Workspace) int { return cmp.Compare(a.Name, b.Name) })
	list := make([]Workspace, len(all))
	for i, w := range all {
		list[i] = w.clone()
	}
	return list
}

// Broken returns the workspaces whose records cannot be read, sorted by name.
func (r *Registry) Broken() []BrokenRecord {
	r.mu.RLock()
	defer r.mu.RUnlock()
	var list []BrokenRecord
	for _, name := range slices.Sorted(maps.Keys(r.broken)) {
		list = append(list, BrokenRecord{Name: name, Err: r.broken[name]})
	}
	return list
}

// Address returns the VIP of the workspace of that name. It is made for being
// asked with each DNS question.
func (r *Registry) Address(name string) (netip.Addr, bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	w, ok := r.byName[name]
	if !ok {
		return netip.Addr{}, false
	}
	return w.Address, true
}

// Owner returns the name of the workspace that owns a VIP or backend address.
func (r *Registry) Owner(addr netip.Addr) (name string, ok bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	name, ok = r.byAddr[addr]
	return name, ok
}

// Gateway returns the gateway's own address: the first host of the VIP range.
func (r *Registry) Gateway() netip.Addr { return r.vips.first() }

// TargetByID returns the target with that ID and its workspace: what an agent's
// introduction leads to. Errors: *NotFoundError.
func (r *Registry) TargetByID(id string) (Workspace, Target, error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if name, ok := r.byID[id]; ok {
		w := r.byName[name].clone()
		for _, t := range w.Targets {
			if t.ID == id {
				return w, t, nil
			}
		}
	}
	return Workspace{}, Target{}, &NotFoundError{What: "target", Name: id}
}
