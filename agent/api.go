package agent

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"net"
	"net/http"
	"sync"
	"time"

	"helix.local/helix/agent/wire"
)

const maxBody = 1 << 20 // of a JSON request

// apiListener hands streams to an http.Server.
type apiListener struct {
	streams chan net.Conn
	once    sync.Once
	closed  chan struct{}
}

func newAPIListener() *apiListener {
	return &apiListener{streams: make(chan net.Conn), closed: make(chan struct{})}
}

// serve gives st to the server and waits until that has closed it.
func (l *apiListener) serve(ctx context.Context, st net.Conn) {
	conn := &apiConn{Conn: st, done: make(chan struct{})}
	select {
	case l.streams <- conn:
	case <-l.closed:
		return
	case <-ctx.Done():
		return
	}
	select {
	case <-conn.done:
	case <-ctx.Done():
		_ = st.Close() // makes the server close it
		<-conn.done
	}
}

// Accept implements net.Listener.
func (l *apiListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.streams:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (l *apiListener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

// Addr implements net.Listener.
func (l *apiListener) Addr() net.Addr { return &net.UnixAddr{Name: wire.ServiceAPI, Net: "stream"} }

type apiConn struct {
	net.Conn
	once sync.Once
	done chan struct{}
}

func (c *apiConn) Close() error {
	err := c.Conn.Close()
	c.once.Do(func() { close(c.done) })
	return err //nolint:wrapcheck // transparent
}

// routes is the API of wire/api.go.
func (t *target) routes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("PUT "+wire.PathIdentity, t.putIdentity)
	mux.HandleFunc("GET "+wire.PathHealth, t.getHealth)
	mux.HandleFunc("GET "+wire.PathPorts, t.getPorts)
	mux.HandleFunc("GET "+wire.PathStats, t.getStats)
	mux.HandleFunc("GET "+wire.PathFiles, t.getFile)
	mux.HandleFunc("PUT "+wire.PathFiles, t.putFile)
	mux.HandleFunc("DELETE "+wire.PathFiles, t.deleteFile)
	mux.HandleFunc("PUT "+wire.PathClock, t.putClock)
	mux.HandleFunc("POST "+wire.PathShutdown, t.postShutdown)
	return mux
}

func (t *target) putIdentity(w http.ResponseWriter, r *http.Request) {
	var id wire.Identity
	if !t.decode(w, r, &id) {
		return
	}
	if err := t.ssh.SetIdentity(id); err != nil {
		t.fail(w, http.StatusBadRequest, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

func (t *target) getHealth(w http.ResponseWriter, _ *http.Request) {
	h := wire.Health{OK: true, Generation: t.boot.Generation, Version: t.version, Booted: t.booted}
	for _, c := range t.checks {
		line := wire.Check{Name: c.name, OK: true}
		if err := c.run(); err != nil {
			line.OK, line.Error, h.OK = false, err.Error(), false
		}
		h.Checks = append(h.Checks, line)
	}
	h.Time = time.Now() // last, so that a slow check does not look like a slow clock
	t.answer(w, h)
}

func (t *target) getPorts(w http.ResponseWriter, r *http.Request) {
	if r.URL.Query().Get("watch") == "" {
		list, err := t.ports.List()
		if err != nil {
			t.fail(w, http.StatusInternalServerError, err)
			return
		}
		t.answer(w, list)
		return
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	out, flush := json.NewEncoder(w), http.NewResponseController(w)
	err := t.ports.Follow(r.Context(), func(list []wire.Port) error {
		return errors.Join(out.Encode(list), flush.Flush())
	})
	if err != nil && r.Context().Err() == nil {
		t.log.WarnContext(r.Context(), "port watch ended", "err", err)
	}
}

func (t *target) getStats(w http.ResponseWriter, _ *http.Request) {
	stats, err := readStats(t.boot.Dir)
	if err != nil {
		t.fail(w, http.StatusInternalServerError, err)
		return
	}
	t.answer(w, stats)
}

func (t *target) putClock(w http.ResponseWriter, r *http.Request) {
	var c wire.Clock
	if !t.decode(w, r, &c) {
		return
	}
	if t.setClock == nil {
		t.fail(w, http.StatusForbidden, errors.New("set clock: it is the gateway's own"))
		return
	}
	if err := t.setClock(c.Time); err != nil {
		t.fail(w, http.StatusInternalServerError, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// postShutdown answers before the end begins, since that takes the stream along.
func (t *target) postShutdown(w http.ResponseWriter, r *http.Request) {
	w.WriteHeader(http.StatusNoContent)
	if err := http.NewResponseController(w).Flush(); err != nil {
		t.log.DebugContext(r.Context(), "shutdown not answered", "err", err)
	}
	t.shutdown()
}

func (t *target) decode(w http.ResponseWriter, r *http.Request, v any) bool {
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody)).Decode(v); err != nil {
		// Not the cause: it may quote a secret.
		t.fail(w, http.StatusBadRequest, errors.New("decode request: not the expected JSON"))
		return false
	}
	return true
}

func (t *target) answer(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(v); err != nil {
		t.log.Debug("api answer not sent", "err", err)
	}
}

// fail answers with err; status counts where the error does not say its own.
func (t *target) fail(w http.ResponseWriter, status int, err error) {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		status = http.StatusNotFound
	case errors.Is(err, fs.ErrPermission):
		status = http.StatusForbidden
	case errors.Is(err, io.ErrUnexpectedEOF):
		status = http.StatusBadRequest
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	if err := json.NewEncoder(w).Encode(wire.APIError{Error: err.Error()}); err != nil {
		t.log.Debug("api error not sent", "err", err)
	}
}
