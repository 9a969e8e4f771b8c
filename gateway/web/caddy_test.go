package web

import (
	"bytes"
	"encoding/json"
	"flag"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap/zapcore"
)

var update = flag.Bool("update", false, "rewrite golden files")

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != string(want) {
		t.Errorf("%s differs, got:\n%s", path, got)
	}
}

// The rendered file and what Caddy makes of it are both pinned: a new Caddy
// that reads the same text differently is seen here.
func TestCaddyfile(t *testing.T) {
	registerModules()
	s := &Server{id: "test", log: slog.New(slog.DiscardHandler), cfg: Config{Storage: "/state dir/certs", Grace: 5 * time.Second}}
	file, err := render(s)
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "Caddyfile.golden", file)
	cfg, err := adapt(file)
	if err != nil {
		t.Fatal(err)
	}
	out, err := json.MarshalIndent(cfg, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "caddy.json.golden", append(out, '\n'))
	if _, err := adapt([]byte("http:// {\n\tno_such_directive\n}\n")); err == nil {
		t.Error("an unknown directive was taken")
	}
}

func TestModulesWithoutTheirServer(t *testing.T) {
	for _, m := range []caddy.Provisioner{
		&handlerModule{}, &transportModule{}, &permissionModule{}, &managerModule{}, &logModule{},
	} {
		if err := m.Provision(caddy.Context{}); err == nil {
			t.Errorf("%T was provisioned for no server", m)
		}
	}
	if _, err := listen(t.Context(), network, "nobody", "80", 0, net.ListenConfig{}); err == nil {
		t.Error("a listener for no server")
	}
	s := &Server{id: "x", plain: newInlet("http"), secure: newInlet("https")}
	addInstance(s)
	defer removeInstance(s)
	if _, err := listen(t.Context(), network, "x", "81", 0, net.ListenConfig{}); err == nil {
		t.Error("a listener for a port that has none")
	}
	if ln, err := listen(t.Context(), network, "x", "80", 0, net.ListenConfig{}); err != nil || ln != s.plain {
		t.Errorf("got %v, %v", ln, err)
	}
	if a := s.plain.Addr(); a.Network() != network || a.String() != "http" {
		t.Errorf("got address %s %s", a.Network(), a)
	}
}

func TestCaddyLogsThroughSlog(t *testing.T) {
	var out strings.Builder
	s := &Server{log: slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}}))}
	m := (&logModule{module: module{server: s}}).With([]zapcore.Field{{Key: "remote-ip", Type: zapcore.StringType, String: "::1"}})
	for level, want := range map[zapcore.Level]string{
		zapcore.InfoLevel:  "level=DEBUG msg=caddy part=tls text=hello remote_ip=::1\n",
		zapcore.ErrorLevel: "level=WARN msg=caddy part=tls text=hello remote_ip=::1\n",
	} {
		out.Reset()
		e := zapcore.Entry{Level: level, LoggerName: "tls", Message: "hello"}
		if c := m.Check(e, nil); c == nil {
			t.Fatalf("%v is not enabled", level)
		}
		if err := m.Write(e, nil); err != nil || out.String() != want {
			t.Errorf("%v: got %q, %v, want %q", level, out.String(), err, want)
		}
	}
	s.log = slog.New(slog.DiscardHandler)
	if m.Check(zapcore.Entry{Level: zapcore.ErrorLevel}, nil) != nil || m.Sync() != nil {
		t.Error("a discarded line was built")
	}
	if logLevel(s.log) != "WARN" || logLevel(slog.New(slog.NewTextHandler(io.Discard, &slog.HandlerOptions{Level: slog.LevelDebug}))) != "DEBUG" {
		t.Error("wrong level for Caddy")
	}
}

// Caddy takes the log package over at import; its lines must end in our log.
func TestStandardLogFollows(t *testing.T) {
	var out bytes.Buffer
	newFixture(t, func(c *Config) {
		c.Log = slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelWarn}))
	})
	log.Print("[ERROR] on the way out")
	log.Print("of no interest")
	if got := out.String(); !strings.Contains(got, "on the way out") || strings.Contains(got, "no interest") {
		t.Errorf("got %q", got)
	}
}

func TestConfigNamesEveryFault(t *testing.T) {
	_, err := New(Config{})
	if err == nil {
		t.Fatal("an empty configuration was taken")
	}
	for _, want := range []string{"zones", "ca", "storage", "resolve, dial"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in %v", want, err)
		}
	}
}

// Two gateways in one process share Caddy's package state, and nothing of it
// may show: each has its own names, certificates and life.
func TestTwoServersInOneProcess(t *testing.T) {
	a, b := newFixture(t), newFixture(t)
	a.serve("demo", hello("a"))
	b.serve("demo", hello("b"))
	ca, cb := a.client(), b.client()
	for range 3 {
		if _, body := a.get(ca, "https://demo.helix.local/"); body != "a demo.helix.local /" {
			t.Fatalf("got %q from a", body)
		}
		if _, body := b.get(cb, "https://demo.helix.local/"); body != "b demo.helix.local /" {
			t.Fatalf("got %q from b", body)
		}
		ca.CloseIdleConnections()
		cb.CloseIdleConnections()
	}
	a.stop()
	if _, body := b.get(cb, "https://demo.helix.local/"); body != "b demo.helix.local /" {
		t.Fatalf("got %q from b after a ended", body)
	}
	c := newFixture(t)
	c.serve("demo", hello("c"))
	if _, body := c.get(c.client(), "https://demo.helix.local/"); body != "c demo.helix.local /" {
		t.Fatalf("got %q from c", body)
	}
	b.stop()
	if _, body := c.get(c.client(), "https://demo.helix.local/"); body != "c demo.helix.local /" {
		t.Fatalf("got %q from c after b ended", body)
	}
}

// Nothing is written outside of the state folder, above all not into the
// folders of a Caddy that the user runs.
func TestWritesOnlyToItsOwnFolder(t *testing.T) {
	home := t.TempDir()
	for _, env := range []string{"HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"} {
		t.Setenv(env, home)
	}
	f := newFixture(t)
	f.serve("demo", hello("x"))
	if resp, _ := f.get(f.client(), "https://demo.helix.local/"); resp.StatusCode != http.StatusOK {
		t.Fatal(resp.Status)
	}
	f.stop()
	if entries, err := os.ReadDir(home); err != nil || len(entries) != 0 {
		t.Errorf("found %v, %v in the home folder", entries, err)
	}
	for _, dir := range []string{caddy.AppDataDir(), filepath.Dir(caddy.ConfigAutosavePath)} {
		if _, err := os.Stat(dir); !os.IsNotExist(err) && strings.HasPrefix(dir, home) {
			t.Errorf("%s: %v", dir, err)
		}
	}
}
