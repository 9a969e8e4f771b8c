package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strconv"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"
)

// Backend is what the API speaks for. Errors that have Hint() string reach the
// client with it.
type Backend interface {
	// Code sorts an error that one of the other methods returned.
	Code(err error) Code
	Info() Info
	Workspaces(ctx context.Context) ([]Workspace, error)
	Workspace(ctx context.Context, name string) (Workspace, error)
	Create(ctx context.Context, req CreateRequest) (Workspace, error)
	Start(ctx context.Context, name string) (Workspace, error)
	Stop(ctx context.Context, name string) (Workspace, error)
	Restart(ctx context.Context, name string) (Workspace, error)
	Remove(ctx context.Context, name string) error
	Plan(ctx context.Context, name string) (Plan, error)
	// Logs writes the last lines of the console (all of it when lines is 0)
	// and, with follow, what comes after until ctx ends.
	Logs(ctx context.Context, name string, lines int, follow bool, w io.Writer) error
	// LastEvent is the sequence number of the newest event.
	LastEvent() uint64
	// Events calls send for each event after seq, the stored ones first, until
	// ctx ends or send fails.
	Events(ctx context.Context, after uint64, workspace string, send func(Event) error) error
	Images(ctx context.Context) ([]Image, error)
	BuildImage(ctx context.Context, name string, progress func(BuildProgress)) (Image, error)
	RemoveImage(ctx context.Context, name string) error
	Keys(ctx context.Context) ([]Key, error)
	AddKey(ctx context.Context, line string) (Key, error)
	RemoveKey(ctx context.Context, selector string) (Key, error)
	SSH(ctx context.Context) (SSHAccess, error)
}

// Handler serves backend.
func Handler(backend Backend, log *slog.Logger) http.Handler {
	mux := http.NewServeMux()
	config := huma.DefaultConfig("Helix", backend.Info().Version)
	config.DocsPath = "" // its page loads scripts from the network
	config.CreateHooks = nil
	doc := humago.New(mux, config)
	s := server{backend: backend, log: log}
	s.workspaces(doc)
	s.images(doc)
	s.keys(doc)
	s.streams(doc)
	return mux
}

type server struct {
	backend Backend
	log     *slog.Logger
}

// problem is an RFC 9457 document with our two members.
type problem struct {
	Status int    `json:"status"`
	Title  string `json:"title"`
	Detail string `json:"detail"`
	Code   Code   `json:"code"`
	Hint   string `json:"hint,omitempty"`
}

// Error implements huma.StatusError.
func (p *problem) Error() string { return p.Detail }

// GetStatus implements huma.StatusError.
func (p *problem) GetStatus() int { return p.Status }

// ContentType implements huma.ContentTypeFilter.
func (p *problem) ContentType(string) string { return "application/problem+json" }

// statusOf is the HTTP status that goes with a code.
var statusOf = map[Code]int{
	CodeInvalid: http.StatusUnprocessableEntity, CodeNotFound: http.StatusNotFound,
	CodeConflict: http.StatusConflict, CodeUnavailable: http.StatusServiceUnavailable,
	CodeInternal: http.StatusInternalServerError,
}

func (s server) problem(err error) *problem {
	p := &problem{Code: s.backend.Code(err), Detail: err.Error()}
	if own, ok := errors.AsType[*Error](err); ok {
		p.Code = own.Code
	}
	if hinted, ok := errors.AsType[interface {
		error
		Hint() string
	}](err); ok {
		p.Hint = hinted.Hint()
	}
	p.Status = statusOf[p.Code]
	p.Title = http.StatusText(p.Status)
	return p
}

type body[T any] struct{ Body T }

type named struct {
	Name string `path:"name" doc:"workspace name" maxLength:"63"`
}

// answer makes a huma handler of a function that returns a value or an error.
func answer[I, O any](s server, f func(context.Context, *I) (O, error)) func(context.Context, *I) (*body[O], error) {
	return func(ctx context.Context, in *I) (*body[O], error) {
		out, err := f(ctx, in)
		if err != nil {
			return nil, s.problem(err)
		}
		return &body[O]{out}, nil
	}
}

func (s server) workspaces(doc huma.API) {
	b := s.backend
	huma.Get(doc, "/v1/info", answer(s, func(context.Context, *struct{}) (Info, error) { return b.Info(), nil }))
	huma.Get(doc, "/v1/workspaces", answer(s, func(ctx context.Context, _ *struct{}) ([]Workspace, error) {
		return b.Workspaces(ctx)
	}))
	huma.Post(doc, "/v1/workspaces", answer(s, func(ctx context.Context, in *body[CreateRequest]) (Workspace, error) {
		return b.Create(ctx, in.Body)
	}), status(http.StatusAccepted))
	huma.Get(doc, "/v1/workspaces/{name}", answer(s, func(ctx context.Context, in *named) (Workspace, error) {
		return b.Workspace(ctx, in.Name)
	}))
	huma.Delete(doc, "/v1/workspaces/{name}", func(ctx context.Context, in *named) (*struct{}, error) {
		if err := b.Remove(ctx, in.Name); err != nil {
			return nil, s.problem(err)
		}
		return nil, nil
	})
	for verb, do := range map[string]func(context.Context, string) (Workspace, error){
		"start": b.Start, "stop": b.Stop, "restart": b.Restart,
	} {
		huma.Post(doc, "/v1/workspaces/{name}/"+verb, answer(s, func(ctx context.Context, in *named) (Workspace, error) {
			return do(ctx, in.Name)
		}), status(http.StatusAccepted))
	}
	huma.Get(doc, "/v1/workspaces/{name}/plan", answer(s, func(ctx context.Context, in *named) (Plan, error) {
		return b.Plan(ctx, in.Name)
	}))
}

func (s server) images(doc huma.API) {
	huma.Get(doc, "/v1/images", answer(s, func(ctx context.Context, _ *struct{}) ([]Image, error) {
		return s.backend.Images(ctx)
	}))
	huma.Delete(doc, "/v1/images/{name}", func(ctx context.Context, in *named) (*struct{}, error) {
		if err := s.backend.RemoveImage(ctx, in.Name); err != nil {
			return nil, s.problem(err)
		}
		return nil, nil
	})
}

func (s server) keys(doc huma.API) {
	huma.Get(doc, "/v1/keys", answer(s, func(ctx context.Context, _ *struct{}) ([]Key, error) { return s.backend.Keys(ctx) }))
	huma.Post(doc, "/v1/keys", answer(s, func(ctx context.Context, in *body[AddKeyRequest]) (Key, error) {
		return s.backend.AddKey(ctx, in.Body.Line)
	}), status(http.StatusCreated))
	type selected struct {
		Selector string `query:"key" required:"true" doc:"fingerprint, its beginning, or the comment"`
	}
	huma.Delete(doc, "/v1/keys", answer(s, func(ctx context.Context, in *selected) (Key, error) {
		return s.backend.RemoveKey(ctx, in.Selector)
	}), status(http.StatusOK))
	huma.Get(doc, "/v1/ssh", answer(s, func(ctx context.Context, _ *struct{}) (SSHAccess, error) { return s.backend.SSH(ctx) }))
}

func status(code int) func(*huma.Operation) {
	return func(o *huma.Operation) { o.DefaultStatus = code }
}

// streams are the answers that go on: text for logs, a JSON value a line for
// the others. Their errors after the first byte end the stream; a build says
// its own in the last line.
func (s server) streams(doc huma.API) {
	type logs struct {
		Name   string `path:"name" doc:"workspace name" maxLength:"63"` // huma fills no embedded field that is not exported
		Lines  int    `query:"lines" minimum:"0"`
		Follow bool   `query:"follow"`
	}
	huma.Get(doc, "/v1/workspaces/{name}/logs", func(ctx context.Context, in *logs) (*huma.StreamResponse, error) {
		if _, err := s.backend.Workspace(ctx, in.Name); err != nil {
			return nil, s.problem(err)
		}
		return s.stream("text/plain; charset=utf-8", func(ctx context.Context, w io.Writer) error {
			return s.backend.Logs(ctx, in.Name, in.Lines, in.Follow, w)
		}), nil
	})
	type events struct {
		After     string `query:"after" doc:"sequence number of the last event already seen; 0 for all that are stored, empty for new ones only"`
		Workspace string `query:"workspace"`
	}
	huma.Get(doc, "/v1/events", func(_ context.Context, in *events) (*huma.StreamResponse, error) {
		after, err := parseAfter(in.After)
		if err != nil {
			return nil, s.problem(err)
		}
		if after == New { // now, not when the stream runs: a client acts as soon as its watch has begun
			after = s.backend.LastEvent()
		}
		return s.stream("application/x-ndjson", func(ctx context.Context, w io.Writer) error {
			line := json.NewEncoder(w)
			return s.backend.Events(ctx, after, in.Workspace, func(e Event) error { return line.Encode(e) })
		}), nil
	})
	huma.Post(doc, "/v1/images/{name}", func(_ context.Context, in *named) (*huma.StreamResponse, error) {
		return s.stream("application/x-ndjson", func(ctx context.Context, w io.Writer) error {
			return s.build(ctx, in.Name, json.NewEncoder(w))
		}), nil
	})
}

// New means "events from now on".
const New = ^uint64(0)

func parseAfter(text string) (uint64, error) {
	if text == "" {
		return New, nil
	}
	after, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0, &Error{Code: CodeInvalid, Message: fmt.Sprintf("after %q is not a sequence number", text)}
	}
	return after, nil
}

func (s server) build(ctx context.Context, name string, line *json.Encoder) error {
	image, err := s.backend.BuildImage(ctx, name, func(p BuildProgress) {
		_ = line.Encode(p) // the client may have gone; the build's own ctx says so
	})
	if err != nil {
		p := s.problem(err)
		return line.Encode(BuildProgress{Error: p.Detail, Hint: p.Hint, Code: p.Code})
	}
	return line.Encode(BuildProgress{Image: &image})
}

// stream answers with what write writes, each Write flushed at once. The
// first bytes of the answer go out before write runs, so that the client sees
// that its watch has begun.
func (s server) stream(kind string, write func(context.Context, io.Writer) error) *huma.StreamResponse {
	return &huma.StreamResponse{Body: func(h huma.Context) {
		h.SetHeader("Content-Type", kind)
		w := flushWriter{w: h.BodyWriter()}
		w.flush()
		if err := write(h.Context(), w); err != nil && h.Context().Err() == nil {
			s.log.WarnContext(h.Context(), "stream ended", "path", h.URL().Path, "err", err)
			panic(http.ErrAbortHandler) // the client must not take this for the end
		}
	}}
}

type flushWriter struct{ w io.Writer }

func (f flushWriter) flush() {
	if rw, ok := f.w.(http.ResponseWriter); ok {
		_ = http.NewResponseController(rw).Flush() // without it the bytes only come later
	}
}

func (f flushWriter) Write(p []byte) (int, error) {
	n, err := f.w.Write(p)
	f.flush()
	return n, err
}
