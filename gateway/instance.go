package gateway

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"helix.local/helix/agent/wire"
	"helix.local/helix/tunnel"
)

// An instance is one run of a target, from its start to its end: the sessions
// that lead to its agent, and what its programs listen on. The keeper of its
// workspace owns it.
type instance struct {
	workspace, target, id string
	generation            uint64
	log                   *slog.Logger
	http                  http.Client // the agent's HTTP API over the best session

	mu       sync.Mutex
	sessions []*tunnel.Session // live ones, best first
	ports    []wire.Port
	up       bool                       // level 2 was reached
	changed  chan struct{}              // closed and replaced when anything above changes
	epoch    uint64                     // of the newest session
	refused  map[wire.Refusal]time.Time // when a refusal of the kind was last noted

	identity sync.Mutex    // one identity is told at a time, so that the newest is the last
	stale    chan struct{} // holds one token when the agent may not have the newest identity
	ended    chan struct{} // closed when the target itself is gone
	why      error         // then: the reason
}

func newInstance(workspace, target, id string, generation uint64, log *slog.Logger) *instance {
	i := &instance{
		workspace: workspace, target: target, id: id, generation: generation,
		log:     log.With("workspace", workspace, "generation", generation),
		changed: make(chan struct{}), ended: make(chan struct{}),
		refused: map[wire.Refusal]time.Time{}, stale: make(chan struct{}, 1),
	}
	i.http.Transport = &http.Transport{
		DisableKeepAlives: true, // a stream costs less than an idle one that keeps probes going
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return i.open(ctx, wire.OpenRequest{Service: wire.ServiceAPI})
		},
	}
	return i
}

// touchLocked tells all waiters that something changed; mu is held.
func (i *instance) touchLocked() {
	close(i.changed)
	i.changed = make(chan struct{})
}

// rank orders links: lower is better for bulk.
func rank(link string) int {
	return slices.Index([]string{wire.LinkUnix, wire.LinkTCP, wire.LinkSerial}, link)
}

// add makes s the session of its kind of link. Of two the one with the higher
// epoch stays: the other lost its link and does not know yet. It is closed.
func (i *instance) add(s *tunnel.Session) {
	i.mu.Lock()
	loser := i.addLocked(s)
	i.mu.Unlock()
	if loser != nil {
		_ = loser.Close() // its link is gone, or about to
	}
	i.outdate()
}

// addLocked returns the session that has to go, or nil; mu is held.
func (i *instance) addLocked(s *tunnel.Session) (loser *tunnel.Session) {
	if at := slices.IndexFunc(i.sessions, func(o *tunnel.Session) bool { return o.Link() == s.Link() }); at >= 0 {
		if loser = i.sessions[at]; loser.Epoch() > s.Epoch() {
			return s
		}
		i.sessions = slices.Delete(i.sessions, at, at+1)
	}
	i.sessions = append(i.sessions, s)
	slices.SortFunc(i.sessions, func(a, b *tunnel.Session) int { return cmp.Compare(rank(a.Link()), rank(b.Link())) })
	i.touchLocked()
	return loser
}

// outdate says that the agent may not have the newest identity.
func (i *instance) outdate() {
	select {
	case i.stale <- struct{}{}:
	default: // said already
	}
}

// refusalPause is how long a refusal of one kind is not noted again.
const refusalPause = time.Minute

// firstRefusal reports whether a refusal is worth noting.
func (i *instance) firstRefusal(why wire.Refusal) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	if time.Since(i.refused[why]) < refusalPause {
		return false
	}
	i.refused[why] = time.Now()
	return true
}

// drop forgets s and nothing else: a newer session of the same link stays.
func (i *instance) drop(s *tunnel.Session) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if at := slices.Index(i.sessions, s); at >= 0 {
		i.sessions = slices.Delete(i.sessions, at, at+1)
		i.touchLocked()
	}
}

// serve keeps s in the instance until the session or ctx ends.
func (i *instance) serve(ctx context.Context, s *tunnel.Session) {
	i.log.InfoContext(ctx, "agent connected", "link", s.Link(), "agent", s.Intro().AgentVersion)
	i.add(s)
	select {
	case <-s.Done():
	case <-ctx.Done():
		_ = s.Close() // its error was the ctx
		<-s.Done()
	}
	i.drop(s)
	i.log.InfoContext(ctx, "agent link ended", "link", s.Link(), "err", s.Err())
}

// nextEpoch grows with every call and across gateways: it starts at the clock.
func (i *instance) nextEpoch() uint64 {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.epoch = max(i.epoch+1, uint64(time.Now().UnixMilli()))
	return i.epoch
}

// watch returns the live sessions and a channel that closes at the next change.
func (i *instance) watch() ([]*tunnel.Session, <-chan struct{}) {
	i.mu.Lock()
	defer i.mu.Unlock()
	return slices.Clone(i.sessions), i.changed
}

// openPatience is how long a link has to answer before the next is tried: one
// whose network was taken down in the guest is silent, not closed.
const openPatience = 2 * time.Second

// linkPatience is how long a target that runs is waited for when none of its
// links is up: after a restart of the gateway the agent is back within moments.
const linkPatience = 3 * time.Second

// open opens a stream on the best session that works.
func (i *instance) open(ctx context.Context, req wire.OpenRequest) (tunnel.Conn, error) {
	waiting, cancel := context.WithTimeout(ctx, linkPatience)
	awaited := i.await(waiting)
	cancel()
	if awaited != nil {
		return nil, fmt.Errorf("open a stream to %q: no link: %w", i.workspace, tunnel.ErrClosed)
	}
	sessions, _ := i.watch()
	err := error(tunnel.ErrClosed)
	for n, s := range sessions {
		trying, cancel := ctx, context.CancelFunc(func() {})
		if n < len(sessions)-1 {
			trying, cancel = context.WithTimeout(ctx, openPatience)
		}
		var stream *tunnel.Stream
		stream, err = s.Open(trying, req)
		silent := trying.Err() != nil && ctx.Err() == nil
		cancel()
		if err == nil {
			return stream, nil
		}
		if !silent && !errors.Is(err, tunnel.ErrClosed) {
			return nil, err
		}
	}
	return nil, fmt.Errorf("open a stream to %q: %w", i.workspace, err)
}

// setUp says whether level 2 has been reached.
func (i *instance) setUp() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.up = true
	i.touchLocked()
}

func (i *instance) ready() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.up
}

// end records that the target is gone; the first reason stays.
func (i *instance) end(why error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	select {
	case <-i.ended:
	default:
		i.why = why
		i.up = false
		close(i.ended)
		i.touchLocked()
	}
}

// err is why the target ended.
func (i *instance) err() error {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.why
}

func (i *instance) listening() []wire.Port {
	i.mu.Lock()
	defer i.mu.Unlock()
	return slices.Clone(i.ports)
}

// portNumbers lists each port once, in order.
func (i *instance) portNumbers() []uint16 {
	var numbers []uint16
	for _, p := range i.listening() {
		numbers = append(numbers, p.Port)
	}
	slices.Sort(numbers)
	return slices.Compact(numbers)
}

// await waits until a session lives (level 1). It fails when the target ends first.
func (i *instance) await(ctx context.Context) error {
	for {
		sessions, changed := i.watch()
		if len(sessions) > 0 {
			return nil
		}
		select {
		case <-changed:
		case <-i.ended:
			return i.err()
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// maxAnswer bounds one answer of an agent, in bytes: a guest is not trusted.
const maxAnswer = 1 << 20

// call sends in to the agent's HTTP API and decodes the answer into out.
func (i *instance) call(ctx context.Context, method, path string, in, out any) error {
	req, err := newRequest(ctx, method, path, in)
	if err != nil {
		return err
	}
	res, err := i.http.Do(req)
	if err != nil {
		return fmt.Errorf("ask the agent for %s: %w", path, err)
	}
	defer res.Body.Close()
	body := io.LimitReader(res.Body, maxAnswer)
	if res.StatusCode >= 300 {
		var fault wire.APIError
		if err := json.NewDecoder(body).Decode(&fault); err != nil {
			fault.Error = res.Status
		}
		return fmt.Errorf("ask the agent for %s: %s", path, fault.Error)
	}
	if out == nil {
		return nil
	}
	if err := json.NewDecoder(body).Decode(out); err != nil {
		return fmt.Errorf("read the agent's answer to %s: %w", path, err)
	}
	return nil
}

// healthPoll is how often health is asked while a target starts.
const healthPoll = 25 * time.Millisecond

// clockSkew is the most that a ready target's clock is off.
const clockSkew = time.Second

// awaitHealth waits until every check of the agent passes (level 2). When ctx
// ends first, the error names the checks that did not pass.
func (i *instance) awaitHealth(ctx context.Context) error {
	tick := time.NewTicker(healthPoll)
	defer tick.Stop()
	last := errors.New("the agent gave no answer")
	for {
		sent := time.Now()
		var h wire.Health
		err := i.call(ctx, http.MethodGet, wire.PathHealth, nil, &h)
		if err == nil {
			err = judge(h, i.generation, sent, time.Now())
		}
		if err == nil {
			return nil
		}
		if ctx.Err() == nil {
			last = err
		}
		select {
		case <-tick.C:
		case <-i.ended:
			return i.err()
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", context.Cause(ctx), last)
		}
	}
}

// judge decides level 2 from an answer that was asked for at sent and came at got.
func judge(h wire.Health, generation uint64, sent, got time.Time) error {
	var faults []error
	for _, c := range h.Checks {
		if !c.OK {
			faults = append(faults, fmt.Errorf("check %s: %s", c.Name, c.Error))
		}
	}
	if h.Generation != generation {
		faults = append(faults, fmt.Errorf("check generation: the agent is of start %d, not %d", h.Generation, generation))
	}
	if early, late := sent.Sub(h.Time), h.Time.Sub(got); early > clockSkew || late > clockSkew {
		faults = append(faults, fmt.Errorf("check clock: off by %s", max(early, late).Round(time.Millisecond)))
	}
	if len(faults) == 0 && !h.OK {
		faults = append(faults, errors.New("the agent says it is not healthy"))
	}
	return errors.Join(faults...)
}

// portsRetry is the pause after a port watch that ended while its session lives.
const portsRetry = 500 * time.Millisecond

// watchPorts follows what the target's programs listen on until ctx ends, and
// calls see after each change.
func (i *instance) watchPorts(ctx context.Context, see func()) {
	for ctx.Err() == nil {
		sessions, changed := i.watch()
		if len(sessions) > 0 {
			err := i.followPorts(ctx, see)
			i.log.DebugContext(ctx, "port watch ended", "err", err)
			pause(ctx, portsRetry)
			continue
		}
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

func (i *instance) followPorts(ctx context.Context, see func()) error {
	req, err := newRequest(ctx, http.MethodGet, wire.PathPorts+"?watch=1", nil)
	if err != nil {
		return err
	}
	res, err := i.http.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	lines := bufio.NewScanner(res.Body)
	lines.Buffer(nil, maxAnswer)
	for lines.Scan() {
		var ports []wire.Port
		if err := json.Unmarshal(lines.Bytes(), &ports); err != nil {
			return fmt.Errorf("read the agent's ports: %w", err)
		}
		i.mu.Lock()
		i.ports = ports
		i.touchLocked()
		i.mu.Unlock()
		see()
	}
	return lines.Err()
}

func newRequest(ctx context.Context, method, path string, in any) (*http.Request, error) {
	var body io.Reader
	if in != nil {
		text, err := json.Marshal(in)
		if err != nil {
			return nil, fmt.Errorf("encode request for the agent: %w", err)
		}
		body = bytes.NewReader(text)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://agent"+path, body)
	if err != nil {
		return nil, fmt.Errorf("request for the agent: %w", err)
	}
	return req, nil
}
