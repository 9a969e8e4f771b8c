package api

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"syscall"
)

// Error is an error that the gateway answered with, or the lack of a gateway.
type Error struct {
	Code    Code
	Message string
	Cure    string // what to do next, "" when nothing is known
}

// Error is the message.
func (e *Error) Error() string { return e.Message }

// Hint is what to do next.
func (e *Error) Hint() string { return e.Cure }

// ErrNoGateway reports that nothing answers on the socket.
var ErrNoGateway = errors.New("no gateway is running")

// Client speaks to the gateway behind one unix socket. It may be used
// concurrently.
type Client struct{ http http.Client }

// NewClient makes a client of the gateway that listens at socket.
func NewClient(socket string) *Client {
	return &Client{http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			conn, err := d.DialContext(ctx, "unix", socket)
			if err != nil {
				return nil, dialError(ctx, socket, err)
			}
			return conn, nil
		},
	}}}
}

// dialError tells a gateway that is not there from one that must not be asked,
// and from a caller that has given up.
func dialError(ctx context.Context, socket string, err error) error {
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, fs.ErrPermission):
		return &Error{
			Code: CodeInternal, Message: fmt.Sprintf("the gateway at %s belongs to another user", socket),
			Cure: "run this as the user who runs helix up, or name a state folder of your own with --state",
		}
	}
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		err = errno // what stands around it says the path once more
	}
	return fmt.Errorf("%w at %s: %v", ErrNoGateway, socket, err)
}

// Close gives up idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// do sends in as JSON (nothing when nil) and decodes the answer into out
// (nothing when nil).
func (c *Client) do(ctx context.Context, method, path string, in, out any) error {
	body, err := c.open(ctx, method, path, in)
	if err != nil {
		return err
	}
	defer body.Close()
	if out == nil {
		return nil
	}
	if err := json.NewDecoder(body).Decode(out); err != nil {
		return fmt.Errorf("read the gateway's answer to %s: %w", path, err)
	}
	return nil
}

func (c *Client) open(ctx context.Context, method, path string, in any) (io.ReadCloser, error) {
	var body io.Reader
	if in != nil {
		text, err := json.Marshal(in)
		if err != nil {
			return nil, fmt.Errorf("encode request: %w", err)
		}
		body = bytes.NewReader(text)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://gateway"+path, body)
	if err != nil {
		return nil, fmt.Errorf("request %s: %w", path, err)
	}
	if in != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	res, err := c.http.Do(req)
	if err != nil {
		if _, ours := errors.AsType[*Error](err); ours || errors.Is(err, ErrNoGateway) {
			return nil, errors.Unwrap(err) // without the URL around it
		}
		return nil, fmt.Errorf("ask the gateway: %w", err)
	}
	if res.StatusCode < 300 {
		return res.Body, nil
	}
	defer res.Body.Close()
	text, err := io.ReadAll(io.LimitReader(res.Body, 64<<10))
	if err != nil {
		return nil, fmt.Errorf("read the gateway's error: %w", err)
	}
	return nil, decodeProblem(res.StatusCode, text)
}

// decodeProblem reads our problem documents and those that huma makes itself
// for requests that do not fit the schema.
func decodeProblem(status int, text []byte) *Error {
	var p struct {
		problem
		Errors []struct {
			Message  string `json:"message"`
			Location string `json:"location"`
		} `json:"errors"`
	}
	if err := json.Unmarshal(text, &p); err != nil || p.Detail == "" {
		return &Error{Code: CodeInternal, Message: fmt.Sprintf("the gateway answered %d: %s", status, bytes.TrimSpace(text))}
	}
	e := &Error{Code: p.Code, Message: p.Detail, Cure: p.problem.Hint}
	for _, fault := range p.Errors {
		e.Message += fmt.Sprintf("; %s: %s", fault.Location, fault.Message)
	}
	if e.Code == "" {
		e.Code = CodeInvalid
	}
	return e
}

func workspacePath(name string) string { return "/v1/workspaces/" + url.PathEscape(name) }

// Info asks what gateway this is.
func (c *Client) Info(ctx context.Context) (Info, error) {
	var out Info
	return out, c.do(ctx, http.MethodGet, "/v1/info", nil, &out)
}

// Workspaces lists all, by name.
func (c *Client) Workspaces(ctx context.Context) ([]Workspace, error) {
	var out []Workspace
	return out, c.do(ctx, http.MethodGet, "/v1/workspaces", nil, &out)
}

// Workspace shows one.
func (c *Client) Workspace(ctx context.Context, name string) (Workspace, error) {
	var out Workspace
	return out, c.do(ctx, http.MethodGet, workspacePath(name), nil, &out)
}

// Create asks for a workspace; it answers before the workspace is ready.
func (c *Client) Create(ctx context.Context, req CreateRequest) (Workspace, error) {
	var out Workspace
	return out, c.do(ctx, http.MethodPost, "/v1/workspaces", req, &out)
}

// Start starts the active target; it answers before the target is ready.
func (c *Client) Start(ctx context.Context, name string) (Workspace, error) {
	return c.verb(ctx, name, "start")
}

// Stop stops the active target and answers when the stop has begun.
func (c *Client) Stop(ctx context.Context, name string) (Workspace, error) {
	return c.verb(ctx, name, "stop")
}

// Restart stops and starts the active target.
func (c *Client) Restart(ctx context.Context, name string) (Workspace, error) {
	return c.verb(ctx, name, "restart")
}

func (c *Client) verb(ctx context.Context, name, verb string) (Workspace, error) {
	var out Workspace
	return out, c.do(ctx, http.MethodPost, workspacePath(name)+"/"+verb, nil, &out)
}

// Remove deletes a workspace from any state and answers when it is gone.
func (c *Client) Remove(ctx context.Context, name string) error {
	return c.do(ctx, http.MethodDelete, workspacePath(name), nil, nil)
}

// Plan is the launch plan of a virtual machine.
func (c *Client) Plan(ctx context.Context, name string) (Plan, error) {
	var out Plan
	return out, c.do(ctx, http.MethodGet, workspacePath(name)+"/plan", nil, &out)
}

// Logs copies console output to w. See Backend.Logs.
func (c *Client) Logs(ctx context.Context, name string, lines int, follow bool, w io.Writer) error {
	query := url.Values{"lines": {strconv.Itoa(lines)}, "follow": {strconv.FormatBool(follow)}}
	body, err := c.open(ctx, http.MethodGet, workspacePath(name)+"/logs?"+query.Encode(), nil)
	if err != nil {
		return err
	}
	defer body.Close()
	if _, err := io.Copy(w, body); err != nil {
		return fmt.Errorf("read the log of %q: %w", name, err)
	}
	return nil
}

// Events calls see for each event after seq (New: from now on) of workspace
// ("" for all), until ctx ends, see returns an error, or the gateway stops;
// then it returns nil, that error, or io.ErrUnexpectedEOF. begun, unless nil,
// is called once the watch stands.
func (c *Client) Events(ctx context.Context, after uint64, workspace string, begun func(), see func(Event) error) error {
	query := url.Values{"workspace": {workspace}}
	if after != New {
		query.Set("after", strconv.FormatUint(after, 10))
	}
	body, err := c.open(ctx, http.MethodGet, "/v1/events?"+query.Encode(), nil)
	if err != nil {
		return err
	}
	defer body.Close()
	if begun != nil {
		begun()
	}
	err = eachLine(body, see)
	if ctx.Err() != nil {
		return nil
	}
	if err == nil {
		return io.ErrUnexpectedEOF
	}
	return err
}

func eachLine[T any](r io.Reader, see func(T) error) error {
	lines := json.NewDecoder(r)
	for {
		var v T
		if err := lines.Decode(&v); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("read from the gateway: %w", err)
		}
		if err := see(v); err != nil {
			return err
		}
	}
}

// Images lists the stored images, by name.
func (c *Client) Images(ctx context.Context) ([]Image, error) {
	var out []Image
	return out, c.do(ctx, http.MethodGet, "/v1/images", nil, &out)
}

// BuildImage builds the image of the recipe called name. The end of ctx
// cancels the build.
func (c *Client) BuildImage(ctx context.Context, name string, progress func(BuildProgress)) (Image, error) {
	body, err := c.open(ctx, http.MethodPost, "/v1/images/"+url.PathEscape(name), nil)
	if err != nil {
		return Image{}, err
	}
	defer body.Close()
	var built *Image
	err = eachLine(body, func(p BuildProgress) error {
		switch {
		case p.Error != "":
			return &Error{Code: p.Code, Message: p.Error, Cure: p.Hint}
		case p.Image != nil:
			built = p.Image
		default:
			progress(p)
		}
		return nil
	})
	if err == nil && built == nil {
		err = fmt.Errorf("build image %q: %w", name, io.ErrUnexpectedEOF)
	}
	if err != nil {
		return Image{}, err
	}
	return *built, nil
}

// RemoveImage removes an image that no workspace uses.
func (c *Client) RemoveImage(ctx context.Context, name string) error {
	return c.do(ctx, http.MethodDelete, "/v1/images/"+url.PathEscape(name), nil, nil)
}

// Keys lists who may log in.
func (c *Client) Keys(ctx context.Context) ([]Key, error) {
	var out []Key
	return out, c.do(ctx, http.MethodGet, "/v1/keys", nil, &out)
}

// AddKey lets the holder of a key log in.
func (c *Client) AddKey(ctx context.Context, line string) (Key, error) {
	var out Key
	return out, c.do(ctx, http.MethodPost, "/v1/keys", AddKeyRequest{line}, &out)
}

// RemoveKey takes one key's access away.
func (c *Client) RemoveKey(ctx context.Context, selector string) (Key, error) {
	var out Key
	return out, c.do(ctx, http.MethodDelete, "/v1/keys?key="+url.QueryEscape(selector), nil, &out)
}

// SSH is what an SSH client needs.
func (c *Client) SSH(ctx context.Context) (SSHAccess, error) {
	var out SSHAccess
	return out, c.do(ctx, http.MethodGet, "/v1/ssh", nil, &out)
}
