package web

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/coder/websocket"
)

func echo(t *testing.T) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		c, err := websocket.Accept(w, r, &websocket.AcceptOptions{InsecureSkipVerify: true})
		if err != nil {
			t.Error(err)
			return
		}
		defer func() { _ = c.CloseNow() }()
		for {
			kind, data, err := c.Read(r.Context())
			if err != nil {
				return
			}
			if err := c.Write(r.Context(), kind, data); err != nil {
				return
			}
		}
	}
}

func roundTrip(ctx context.Context, c *websocket.Conn, text string) error {
	if err := c.Write(ctx, websocket.MessageText, []byte(text)); err != nil {
		return err
	}
	_, got, err := c.Read(ctx)
	if err == nil && string(got) != text {
		err = fmt.Errorf("got %q, want %q", got, text)
	}
	return err
}

func TestWebSocketsSurviveWorkspacesComingAndGoing(t *testing.T) {
	f := newFixture(t)
	f.serve("demo", echo(t))
	// HTTP/1.1 has no stream limit a connection; browsers do the same.
	h1 := f.client(func(tr *http.Transport) {
		tr.ForceAttemptHTTP2 = false
		tr.TLSClientConfig.NextProtos = []string{"http/1.1"}
	})
	const sockets = 200
	conns := make([]*websocket.Conn, sockets)
	var wait sync.WaitGroup
	for i := range conns {
		wait.Go(func() {
			c, _, err := websocket.Dial(t.Context(), "wss://demo.helix.local/", &websocket.DialOptions{HTTPClient: h1})
			if err != nil {
				t.Error(err)
				return
			}
			conns[i] = c
		})
	}
	wait.Wait()
	if t.Failed() {
		t.FailNow()
	}
	before := f.server.id
	for i := range 100 {
		name := fmt.Sprintf("w%d", i)
		upstream := f.serve(name, hello(name))
		if _, body := f.get(h1, "https://"+name+".helix.local/"); !strings.HasPrefix(body, name) {
			t.Fatalf("%s: got %q", name, body)
		}
		f.remove(name)
		upstream.Close()
	}
	for i, c := range conns {
		if err := roundTrip(t.Context(), c, fmt.Sprint("message ", i)); err != nil {
			t.Fatalf("socket %d: %v", i, err)
		}
	}
	if f.server.id != before {
		t.Error("the server was replaced")
	}
	// A stop says goodbye instead of cutting the line.
	f.stop()
	for i, c := range conns {
		_, _, err := c.Read(t.Context())
		if websocket.CloseStatus(err) != websocket.StatusGoingAway {
			t.Fatalf("socket %d: got %v, want going away", i, err)
		}
		_ = c.CloseNow()
	}
}

func TestWebSocketToTLSAndH2CServices(t *testing.T) {
	f := newFixture(t)
	secure := httptest.NewUnstartedServer(echo(t))
	secure.EnableHTTP2 = true
	secure.StartTLS()
	defer secure.Close()
	plain := httptest.NewServer(echo(t))
	defer plain.Close()
	f.add("secure", 443, ProtocolHTTPS, secure.Listener.Addr().String())
	f.add("h2c", 80, ProtocolH2C, plain.Listener.Addr().String())
	h1 := f.client(func(tr *http.Transport) {
		tr.TLSClientConfig.NextProtos = []string{"http/1.1"}
		tr.ForceAttemptHTTP2 = false
	})
	for _, name := range []string{"secure", "h2c"} {
		c, _, err := websocket.Dial(t.Context(), "wss://"+name+".helix.local/", &websocket.DialOptions{HTTPClient: h1})
		if err != nil {
			t.Fatal(name, err)
		}
		if err := roundTrip(t.Context(), c, "hello"); err != nil {
			t.Error(name, err)
		}
		_ = c.Close(websocket.StatusNormalClosure, "")
	}
}
