// Command peer is the far end of the end-to-end tests: a program inside a
// workspace that behaves, on one port each, in the ways that proxies get wrong.
package main

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/coder/websocket"
)

// modes are what a port can do with a connection. Each closes it.
var modes = map[string]func(*net.TCPConn) error{
	"sum":    sum,
	"first":  first,
	"reset":  reset,
	"blob":   blob,
	"hold":   hold,
	"socket": socket,
}

func main() {
	if len(os.Args) == 3 && os.Args[1] == "pull" {
		if err := pull(os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, "peer:", err)
			os.Exit(1)
		}
		return
	}
	failed := make(chan error)
	for _, arg := range os.Args[1:] { // MODE=ADDRESS, or relay=ADDRESS,UPSTREAM
		mode, addr, _ := strings.Cut(arg, "=")
		addr, upstream, relays := strings.Cut(addr, ",")
		serve, ok := modes[mode]
		if mode == "relay" && relays {
			serve, ok = relay(upstream), true
		}
		if !ok {
			fmt.Fprintln(os.Stderr, "peer: unknown mode", mode)
			os.Exit(2)
		}
		l, err := net.Listen("tcp", addr)
		if err != nil {
			fmt.Fprintln(os.Stderr, "peer:", err)
			os.Exit(1)
		}
		go func() { failed <- accept(l, serve) }()
	}
	fmt.Fprintln(os.Stdout, "listening")
	fmt.Fprintln(os.Stderr, "peer:", <-failed)
	os.Exit(1)
}

func accept(l net.Listener, serve func(*net.TCPConn) error) error {
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			if err := serve(c.(*net.TCPConn)); err != nil {
				fmt.Fprintln(os.Stderr, "peer:", err)
			}
		}()
	}
}

// sum reads to the end and answers with a checksum of all of it.
func sum(c *net.TCPConn) error {
	defer c.Close()
	h := sha256.New()
	if _, err := io.Copy(h, c); err != nil {
		return err
	}
	_, err := fmt.Fprintf(c, "%x\n", h.Sum(nil))
	return err
}

// first finishes its side at once, and then says on standard output how much
// the client still sent.
func first(c *net.TCPConn) error {
	defer c.Close()
	if _, err := io.WriteString(c, "done first\n"); err != nil {
		return err
	}
	if err := c.CloseWrite(); err != nil {
		return err
	}
	n, err := io.Copy(io.Discard, c)
	fmt.Fprintf(os.Stdout, "first got %d\n", n)
	return err
}

// reset breaks off with a RST after the first bytes.
func reset(c *net.TCPConn) error {
	var one [1]byte
	_, err := c.Read(one[:])
	return errors.Join(err, c.SetLinger(0), c.Close())
}

// blob sends 64 MiB as an HTTP answer that says so.
func blob(c *net.TCPConn) error {
	defer c.Close()
	const size = 64 << 20
	if _, err := fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n", size); err != nil {
		return err
	}
	chunk := make([]byte, 64<<10)
	for sent := 0; sent < size; sent += len(chunk) {
		if _, err := c.Write(chunk); err != nil {
			return err
		}
	}
	return nil
}

// relay passes connections on to upstream with nothing in between. On Linux the
// copies are splice(2): the bytes never come into this process.
func relay(upstream string) func(*net.TCPConn) error {
	return func(c *net.TCPConn) error {
		defer c.Close()
		up, err := net.Dial("tcp", upstream)
		if err != nil {
			return err
		}
		defer up.Close()
		back := make(chan error, 1)
		go func() {
			_, err := io.Copy(up, c)
			back <- errors.Join(err, up.(*net.TCPConn).CloseWrite())
		}()
		_, err = io.Copy(c, up)
		return errors.Join(err, c.CloseWrite(), <-back)
	}
}

// pull reads from an address to the end, and prints how many bytes came in how
// many nanoseconds.
func pull(addr string) error {
	began := time.Now()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.(*net.TCPConn).CloseWrite(); err != nil {
		return err
	}
	total, buf := 0, make([]byte, 256<<10)
	for {
		n, err := c.Read(buf)
		total += n
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
	}
	_, err = fmt.Fprintln(os.Stdout, total, time.Since(began).Nanoseconds())
	return err
}

// hold says one line and then nothing until the client goes.
func hold(c *net.TCPConn) error {
	defer c.Close()
	if _, err := io.WriteString(c, "held\n"); err != nil {
		return err
	}
	_, err := io.Copy(io.Discard, c)
	return err
}

// socket is a WebSocket that says back what it hears.
func socket(c *net.TCPConn) error {
	srv := http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ws, err := websocket.Accept(w, r, &websocket.AcceptOptions{InsecureSkipVerify: true}) // any origin
		if err != nil {
			return // it has answered already
		}
		defer ws.CloseNow()
		for {
			kind, text, err := ws.Read(r.Context())
			if err != nil {
				return
			}
			if err := ws.Write(r.Context(), kind, text); err != nil {
				return
			}
		}
	})}
	l := &single{c: c}
	if err := srv.Serve(l); !errors.Is(err, io.EOF) {
		return err
	}
	return nil
}

// single is a listener with one connection to give.
type single struct{ c *net.TCPConn }

func (s *single) Accept() (net.Conn, error) {
	if s.c == nil {
		return nil, io.EOF
	}
	c := s.c
	s.c = nil
	return c, nil
}
func (s *single) Close() error   { return nil }
func (s *single) Addr() net.Addr { return &net.TCPAddr{} }
