package web

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"fmt"
	"html/template"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"
)

//go:embed page.html
var pageHTML string

var pageTemplate = template.Must(template.New("page.html").Parse(pageHTML))

// page is one answer of the gateway's own, in all its forms.
type page struct {
	Reason    Reason `json:"reason"`
	Status    int    `json:"status"`
	Workspace string `json:"workspace,omitempty"`
	Port      uint16 `json:"port,omitempty"`
	Title     string `json:"message"`
	Detail    string `json:"detail,omitempty"`
	Hint      string `json:"hint,omitempty"`
	Stage     string `json:"stage,omitempty"`
	Links     []link `json:"links,omitempty"`
	Retry     int    `json:"retry_after,omitempty"` // seconds
}

type link struct {
	Text string `json:"text"`
	URL  string `json:"url"`
}

// page says what e means for a request for name.
func (s *Server) page(r *http.Request, name Name, e *RouteError) page {
	p := page{
		Reason: e.Reason, Status: e.Reason.Status(), Workspace: e.Workspace, Port: e.Port,
		Detail: e.Message, Stage: e.Stage,
	}
	if p.Workspace == "" {
		p.Workspace = name.Workspace
	}
	p.Title, p.Hint = words(e.Reason, p.Workspace, name, e.Port)
	if p.Detail == "" && e.Reason == ReasonBadAnswer && e.Err != nil {
		p.Detail = e.Err.Error()
	}
	if e.Reason == ReasonStarting {
		wait := e.RetryAfter
		if wait == 0 {
			wait = 2 * time.Second
		}
		p.Retry = max(1, int((wait+time.Second-1)/time.Second))
	}
	if e.Nearest != "" {
		p.Links = append(p.Links, s.link(r, e.Nearest))
	}
	for _, port := range e.Ports {
		p.Links = append(p.Links, s.link(r, strconv.Itoa(int(port))+"."+p.Workspace))
	}
	return p
}

// link leads to a name of the main zone over the scheme and port of r.
func (s *Server) link(r *http.Request, name string) link {
	host := name + "." + s.cfg.Zones[0]
	scheme := "http"
	if r.TLS != nil {
		scheme = "https"
	}
	at := host
	if _, port, err := net.SplitHostPort(r.Host); err == nil {
		at = net.JoinHostPort(host, port)
	}
	return link{Text: host, URL: scheme + "://" + at + "/"}
}

// words puts a reason into a sentence and, where there is one, a next step.
func words(reason Reason, workspace string, name Name, port uint16) (title, hint string) {
	switch reason {
	case ReasonUnknownHost:
		return "This name does not belong to the gateway.", "helix ls"
	case ReasonUnknownWorkspace:
		return fmt.Sprintf("There is no workspace %q.", workspace), "helix ls"
	case ReasonUnknownService:
		return fmt.Sprintf("Workspace %q has no service %q.", workspace, name.Service), "helix ports " + workspace
	case ReasonMisdirected:
		return "This connection belongs to another workspace.", ""
	case ReasonStopped:
		return fmt.Sprintf("Workspace %q is stopped.", workspace), "helix start " + workspace
	case ReasonStarting:
		return fmt.Sprintf("Workspace %q is starting.", workspace), ""
	case ReasonFailed:
		return fmt.Sprintf("Workspace %q could not be started.", workspace), "helix logs " + workspace
	case ReasonRefused:
		if port == 0 {
			return fmt.Sprintf("No web service listens in workspace %q.", workspace), "helix ports " + workspace
		}
		return fmt.Sprintf("Nothing listens on port %d of workspace %q.", port, workspace), "helix ports " + workspace
	case ReasonTunnelDown:
		return fmt.Sprintf("The connection to workspace %q is down.", workspace), "helix status " + workspace
	case ReasonBadAnswer:
		return fmt.Sprintf("The service on port %d of workspace %q gave no complete answer.", port, workspace), ""
	case ReasonTimeout:
		return fmt.Sprintf("Port %d of workspace %q did not answer in time.", port, workspace), "helix status " + workspace
	default:
		return "The gateway cannot serve this name.", ""
	}
}

// writePage answers in the form that the client accepts: a page for browsers,
// JSON for who asks for it, text for all others.
func writePage(w http.ResponseWriter, r *http.Request, p page) error {
	var body bytes.Buffer
	kind := "text/plain; charset=utf-8"
	accept := strings.Join(r.Header.Values("Accept"), ",")
	switch {
	case strings.Contains(accept, "text/html"):
		kind = "text/html; charset=utf-8"
		if err := pageTemplate.Execute(&body, p); err != nil {
			return fmt.Errorf("render page: %w", err)
		}
	case strings.Contains(accept, "json"):
		kind = "application/json"
		enc := json.NewEncoder(&body)
		enc.SetEscapeHTML(false)
		if err := enc.Encode(p); err != nil {
			return fmt.Errorf("encode page: %w", err)
		}
	default:
		p.text(&body)
	}
	h := w.Header()
	h.Set("Content-Type", kind)
	h.Set("Content-Length", strconv.Itoa(body.Len()))
	h.Set("Cache-Control", "no-store")
	h.Set("X-Helix-Reason", string(p.Reason))
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'")
	if p.Retry > 0 {
		h.Set("Retry-After", strconv.Itoa(p.Retry))
	}
	w.WriteHeader(p.Status)
	if r.Method == http.MethodHead {
		return nil
	}
	_, _ = w.Write(body.Bytes()) // the client left: nobody to tell
	return nil
}

func (p page) text(out *bytes.Buffer) {
	line := func(key, value string) {
		if value != "" {
			fmt.Fprintf(out, "%s%s\n", key, value)
		}
	}
	line("", p.Title)
	line("", p.Detail)
	line("stage: ", p.Stage)
	line("try: ", p.Hint)
	for _, l := range p.Links {
		line("see: ", l.URL)
	}
}
