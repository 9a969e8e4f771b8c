package vmctl

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"helix.local/helix/vmctl/guestnet"
)

// Status is what a shim tells about its machine.
type Status struct {
	Version    int       `json:"version"`
	Name       string    `json:"name"`
	UUID       string    `json:"uuid"`
	Generation uint64    `json:"generation"`
	State      State     `json:"state"`
	Step       Step      `json:"step,omitempty"` // while Starting
	Accel      string    `json:"accel"`
	Machine    string    `json:"machine"`
	ShimPID    int       `json:"shim_pid"` // for people, never to be killed by
	QEMUPID    int       `json:"qemu_pid,omitempty"`
	Started    time.Time `json:"started"`
	Exit       *Exit     `json:"exit,omitempty"`
	Console    []string  `json:"console,omitempty"` // last lines, oldest first
}

// NetworkStatus is a machine's network: what was planned, what is enforced, and
// what QEMU says it is attached to.
type NetworkStatus struct {
	Planned  Network         `json:"planned"`
	Enforced guestnet.Status `json:"enforced"`
	NIC      string          `json:"nic"`
	MAC      string          `json:"mac"`
	Backend  string          `json:"backend"` // kind, "stream"
	Matches  bool            `json:"matches"` // as planned
	Problem  string          `json:"problem,omitempty"`
}

type stopRequest struct {
	Phase StopPhase `json:"phase"`
}

type apiError struct {
	Error string `json:"error"`
}

// routes is the shim's API. Who can open the socket owns the machine.
func (s *shim) routes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) {
		st, _ := s.snapshot()
		s.answer(w, http.StatusOK, st)
	})
	mux.HandleFunc("GET /watch", s.watch)
	mux.HandleFunc("GET /network", func(w http.ResponseWriter, r *http.Request) {
		// Not bound to the client: one that leaves must not cost the monitor.
		st, err := s.readNetwork(context.WithoutCancel(r.Context()))
		if err != nil {
			s.answer(w, http.StatusConflict, apiError{err.Error()})
			return
		}
		s.answer(w, http.StatusOK, st)
	})
	mux.HandleFunc("POST /stop", func(w http.ResponseWriter, r *http.Request) {
		var q stopRequest
		if err := json.NewDecoder(io.LimitReader(r.Body, 1<<10)).Decode(&q); err != nil {
			s.answer(w, http.StatusBadRequest, apiError{err.Error()})
			return
		}
		ctx, cancel := context.WithTimeout(r.Context(), limitOf(s.plan.Stop, string(q.Phase)))
		defer cancel()
		if err := s.stop(ctx, q.Phase); err != nil {
			s.answer(w, http.StatusConflict, apiError{err.Error()})
			return
		}
		s.answer(w, http.StatusOK, struct{}{})
	})
	return mux
}

func (s *shim) answer(w http.ResponseWriter, code int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	if err := json.NewEncoder(w).Encode(body); err != nil {
		s.log.Debug("answer not sent", "err", err)
	}
}

// watch sends the status now and at each change, one JSON line each, and ends
// after the one that holds the exit.
func (s *shim) watch(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/x-ndjson")
	out := http.NewResponseController(w)
	for {
		st, changed := s.snapshot()
		if json.NewEncoder(w).Encode(st) != nil || out.Flush() != nil || st.Exit != nil {
			return
		}
		select {
		case <-changed:
		case <-r.Context().Done():
			return
		}
	}
}

// change is the one place where the status changes.
func (s *shim) change(f func(*Status)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(&s.status)
	close(s.changed)
	s.changed = make(chan struct{})
}

// snapshot returns the status and a channel that closes when it changes.
func (s *shim) snapshot() (Status, <-chan struct{}) {
	s.mu.Lock()
	st, changed := s.status, s.changed
	s.mu.Unlock()
	st.Console = s.console.Lines()
	return st, changed
}

func (s *shim) readNetwork(ctx context.Context) (NetworkStatus, error) {
	s.mu.Lock()
	m := s.monitor
	s.mu.Unlock()
	if m == nil {
		return NetworkStatus{}, errors.New("the machine has no network yet")
	}
	ctx, cancel := context.WithTimeout(ctx, limitOf(s.plan.Steps, string(StepNetwork)))
	defer cancel()
	cards, err := m.cards(ctx)
	if err != nil {
		return NetworkStatus{}, err
	}
	st := NetworkStatus{Planned: s.plan.Network, Enforced: s.network.Status(), Matches: true}
	if len(cards) > 0 {
		st.NIC, st.MAC, st.Backend = cards[0].name, cards[0].mac, cards[0].peerKind
	}
	if err := compareNetwork(s.plan.Network, s.plan.Sockets.Net, cards); err != nil {
		st.Matches, st.Problem = false, err.Error()
	}
	return st, nil
}

// client speaks to one shim.
type client struct{ http *http.Client }

func newClient(socket string) *client {
	return &client{&http.Client{Transport: &http.Transport{
		DisableKeepAlives: true, // so that nothing is left behind
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		},
	}}}
}

func (c *client) do(ctx context.Context, method, path string, body io.Reader) (*http.Response, error) {
	r, err := http.NewRequestWithContext(ctx, method, "http://shim"+path, body)
	if err != nil {
		return nil, fmt.Errorf("ask shim: %w", err)
	}
	reply, err := c.http.Do(r)
	if err != nil {
		return nil, fmt.Errorf("ask shim: %w", err)
	}
	if reply.StatusCode == http.StatusOK {
		return reply, nil
	}
	defer reply.Body.Close()
	var e apiError
	if err := json.NewDecoder(io.LimitReader(reply.Body, 64<<10)).Decode(&e); err != nil || e.Error == "" {
		return nil, fmt.Errorf("ask shim: %s", reply.Status)
	}
	return nil, errors.New(e.Error)
}

func (c *client) get(ctx context.Context, path string, v any) error {
	reply, err := c.do(ctx, http.MethodGet, path, nil)
	if err != nil {
		return err
	}
	defer reply.Body.Close()
	if err := json.NewDecoder(reply.Body).Decode(v); err != nil {
		return fmt.Errorf("ask shim: %w", err)
	}
	return nil
}
