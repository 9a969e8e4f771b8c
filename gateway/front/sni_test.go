package front

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http/httptest"
	"net/netip"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// sniFixture is an SNI behind a listener. What it terminates comes back on a
// channel.
type sniFixture struct {
	addr       netip.AddrPort
	terminated chan Conn
	stop       func()
}

func runSNI(t *testing.T, change ...func(*SNIConfig)) *sniFixture {
	t.Helper()
	f := &sniFixture{terminated: make(chan Conn, 16)}
	cfg := SNIConfig{
		Passthrough: func(string) (Dial, bool) { return nil, false },
		Relay:       relay,
		Terminate:   func(_ context.Context, c Conn) { f.terminated <- c },
	}
	for _, c := range change {
		c(&cfg)
	}
	sni := NewSNI(cfg)
	s, stop := runSet(t, Config{Handle: func(ctx context.Context, c *net.TCPConn, _ Local) { sni.Handle(ctx, c) }})
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := sni.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	f.stop = sync.OnceFunc(func() { _ = stop(); cancel(); running.Wait() })
	t.Cleanup(f.stop)
	_, f.addr = open(t, s, RoleHTTPS)
	return f
}

// relay is a plain two-way copy, as the tunnel's does it.
func relay(_ context.Context, a, b Conn) error {
	var wait sync.WaitGroup
	half := func(dst, src Conn) {
		_, _ = io.Copy(dst, src)
		_ = dst.CloseWrite()
	}
	wait.Go(func() { half(a, b) })
	wait.Go(func() { half(b, a) })
	wait.Wait()
	return errors.Join(a.Close(), b.Close())
}

// passTo passes one server name through to the server at addr.
func passTo(name, addr string) func(*SNIConfig) {
	return func(c *SNIConfig) {
		c.Passthrough = func(sni string) (Dial, bool) {
			return func(ctx context.Context) (Conn, error) {
				var d net.Dialer
				conn, err := d.DialContext(ctx, "tcp", addr)
				if err != nil {
					return nil, err
				}
				return conn.(*net.TCPConn), nil
			}, sni == name
		}
	}
}

func TestPassthroughKeepsTheServicesOwnTLS(t *testing.T) {
	service := httptest.NewUnstartedServer(nil)
	service.StartTLS() // for its certificate
	cert := service.TLS.Certificates[0]
	service.Close()
	ln, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{cert}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	// Reads to the client's end, then answers with a checksum: half-close both ways.
	go func() {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		sum := sha256.New()
		_, _ = io.Copy(sum, c)
		_, _ = c.Write(sum.Sum(nil))
		_ = c.Close()
	}()
	f := runSNI(t, passTo("own.helix.local", ln.Addr().String()))
	c := tls.Client(dial(t, f.addr), &tls.Config{ServerName: "OWN.helix.local", InsecureSkipVerify: true})
	data := make([]byte, 1<<20)
	_, _ = rand.Read(data)
	if _, err := c.Write(data); err != nil {
		t.Fatal(err)
	}
	if got := c.ConnectionState().PeerCertificates[0]; !bytes.Equal(got.Raw, cert.Certificate[0]) {
		t.Error("the certificate is not the service's")
	}
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	want := sha256.Sum256(data)
	if got, err := io.ReadAll(c); err != nil || !bytes.Equal(got, want[:]) {
		t.Errorf("got %x, %v, want %x", got, err, want)
	}
}

func TestPassthroughToNobodyIsAReset(t *testing.T) {
	f := runSNI(t, passTo("own.helix.local", netip.AddrPortFrom(loopback, freePort(t)).String()))
	c := tls.Client(dial(t, f.addr), &tls.Config{ServerName: "own.helix.local", InsecureSkipVerify: true})
	if err := c.HandshakeContext(t.Context()); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("got %v, want a reset", err)
	}
}

// What is terminated arrives whole: the bytes that were looked at, the rest,
// both addresses and the half-close.
func TestTerminated(t *testing.T) {
	f := runSNI(t)
	clientHello := record(t, "demo.helix.local")
	for name, head := range map[string][]byte{
		"server name":    clientHello,
		"no server name": record(t, ""),
		"not TLS":        []byte("GET / HTTP/1.1\r\n\r\n"),
		"a few bytes":    []byte("\x16\x03"),
		"large hello":    append([]byte{0x16, 3, 1, 0x3f, 0xff}, make([]byte, 0x3fff)...),
	} {
		t.Run(name, func(t *testing.T) {
			client := dial(t, f.addr)
			if _, err := client.Write(head); err != nil {
				t.Fatal(err)
			}
			if _, err := io.WriteString(client, "tail"); err != nil {
				t.Fatal(err)
			}
			_ = client.CloseWrite()
			c := <-f.terminated
			got, err := io.ReadAll(c)
			if err != nil || string(got) != string(head)+"tail" {
				t.Errorf("got %d bytes, %v, want %d", len(got), err, len(head)+4)
			}
			if c.LocalAddr().String() != f.addr.String() || c.RemoteAddr().String() != client.LocalAddr().String() {
				t.Errorf("got %s and %s", c.LocalAddr(), c.RemoteAddr())
			}
			if _, err := io.WriteString(c, "answer"); err != nil {
				t.Error(err)
			}
			_ = c.Close()
			if answer, err := io.ReadAll(client); err != nil || string(answer) != "answer" {
				t.Errorf("got %q, %v", answer, err)
			}
		})
	}
}

func TestSilentClients(t *testing.T) {
	f := runSNI(t, func(c *SNIConfig) { c.HelloTimeout = 30 * time.Millisecond })
	for _, head := range []string{"", "\x16\x03\x01\x10\x00 not all of it"} {
		c := dial(t, f.addr)
		_, _ = io.WriteString(c, head)
		if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%q: got %v, want an end", head, err)
		}
	}
	gone := dial(t, f.addr)
	_ = gone.CloseWrite() // said nothing and never will
	if _, err := gone.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("got %v", err)
	}
	select {
	case c := <-f.terminated:
		t.Errorf("%s was handed on", c.RemoteAddr())
	default:
	}
}

func TestStopDuringTheHello(t *testing.T) {
	f := runSNI(t, func(c *SNIConfig) { c.HelloTimeout = time.Hour })
	c := dial(t, f.addr)
	_, _ = io.WriteString(c, "\x16")
	marker := dial(t, f.addr) // accepted after c, so c's handler is at work
	_, _ = io.WriteString(marker, "hello")
	_ = (<-f.terminated).Close()
	f.stop()
	if _, err := c.Read(make([]byte, 1)); err == nil {
		t.Error("still open")
	}
}

func TestHandleWithoutRun(t *testing.T) {
	sni := NewSNI(SNIConfig{})
	a, b := net.Pipe()
	defer func() { _ = b.Close() }()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	sni.Handle(ctx, a)
	if _, err := b.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("got %v", err)
	}
	_ = sni.inlet.Close()
	c, d := net.Pipe()
	defer func() { _ = d.Close() }()
	sni.Handle(t.Context(), c)
	if _, err := d.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("got %v", err)
	}
}

// record is a real ClientHello.
func record(t testing.TB, serverName string) []byte {
	t.Helper()
	a, b := net.Pipe()
	got := make(chan []byte, 1)
	go func() {
		buf := make([]byte, 16<<10)
		n, _ := b.Read(buf)
		_ = b.Close()
		got <- buf[:n]
	}()
	_ = tls.Client(a, &tls.Config{ServerName: serverName, InsecureSkipVerify: true}).HandshakeContext(t.Context())
	_ = a.Close()
	return <-got
}

// FuzzSNI checks that no first bytes whatever get lost, and that a name given
// to Passthrough was really in them.
func FuzzSNI(f *testing.F) {
	hello := record(f, "own.helix.local")
	f.Add(hello)
	f.Add(hello[:len(hello)-1])
	f.Add(append(hello, "more"...))
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Add([]byte{0x16, 3, 1, 0, 0})
	terminated := make(chan Conn, 1)
	var asked string
	sni := NewSNI(SNIConfig{
		Passthrough: func(name string) (Dial, bool) { asked = name; return nil, false },
		Terminate:   func(_ context.Context, c Conn) { terminated <- c },
	})
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = sni.Run(ctx) })
	f.Cleanup(func() { cancel(); running.Wait() })
	f.Fuzz(func(t *testing.T, data []byte) {
		asked = ""
		sni.Handle(t.Context(), &bytesConn{Reader: bytes.NewReader(data)})
		select {
		case c := <-terminated:
			got, err := io.ReadAll(c)
			if err != nil || !bytes.Equal(got, data) {
				t.Fatalf("got %q, %v, want %q", got, err, data)
			}
		default:
			if len(data) != 0 {
				t.Fatalf("%q was dropped", data)
			}
		}
		if asked != "" && !strings.Contains(strings.ToLower(string(data)), asked) {
			t.Fatalf("%q is not in %q", asked, data)
		}
	})
}

// bytesConn is a client that sends its bytes and closes its side.
type bytesConn struct {
	net.Conn
	*bytes.Reader
}

func (c *bytesConn) Read(p []byte) (int, error)      { return c.Reader.Read(p) }
func (c *bytesConn) SetReadDeadline(time.Time) error { return nil }
func (c *bytesConn) RemoteAddr() net.Addr            { return &net.TCPAddr{} }
func (c *bytesConn) Close() error                    { return nil }
