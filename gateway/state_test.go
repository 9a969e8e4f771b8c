package gateway

import (
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

var discard = slog.New(slog.DiscardHandler)

func TestStateFolderFaults(t *testing.T) {
	base := t.TempDir()
	open := filepath.Join(base, "open")
	if err := os.Mkdir(open, 0o755); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(base, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	cases := map[string]struct{ path, want string }{
		"relative":        {"state", "not an absolute path"},
		"others can look": {open, "its mode is 0755"},
		"a file":          {file, "not a directory"},
		"too long":        {"/" + strings.Repeat("x", 120), "too long for a unix socket"},
		"below a file":    {filepath.Join(file, "x"), "not a directory"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			err := prepareState(c.path)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("got %v, want %q", err, c.want)
			}
			if hintOf(err) == "" {
				t.Error("no hint")
			}
		})
	}
	good := filepath.Join(base, "good")
	for range 2 {
		if err := prepareState(good); err != nil {
			t.Fatal(err)
		}
	}
	if info, _ := os.Stat(good); info.Mode().Perm() != 0o700 {
		t.Errorf("mode %v", info.Mode())
	}
}

func TestSecondGatewayNamesTheFirst(t *testing.T) {
	state := t.TempDir()
	first, err := lockState(state)
	if err != nil {
		t.Fatal(err)
	}
	_, err = lockState(state)
	if err == nil || !strings.Contains(err.Error(), "a gateway runs here already (process ") || hintOf(err) == "" {
		t.Errorf("second: %v", err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	again, err := lockState(state)
	if err != nil {
		t.Fatal(err)
	}
	if err := again.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestGatewayKeyIsNeverReplacedSilently(t *testing.T) {
	path := filepath.Join(t.TempDir(), "gateway.key")
	first, err := openKey(path)
	if err != nil {
		t.Fatal(err)
	}
	if info, _ := os.Stat(path); info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v", info.Mode())
	}
	second, err := openKey(path)
	if err != nil || !first.Equal(second) {
		t.Errorf("opened again: %v, same %v", err, first.Equal(second))
	}
	if err := os.WriteFile(path, []byte("not a key"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := openKey(path); err == nil || hintOf(err) == "" {
		t.Errorf("broken key: %v", err)
	}
	if text, _ := os.ReadFile(path); string(text) != "not a key" {
		t.Error("the broken file was overwritten")
	}
}

func TestRangeIsHalved(t *testing.T) {
	for in, want := range map[string][2]string{
		"127.88.0.0/16": {"127.88.0.0/17", "127.88.128.0/17"},
		"127.90.4.0/24": {"127.90.4.0/25", "127.90.4.128/25"},
		"127.16.0.0/12": {"127.16.0.0/13", "127.24.0.0/13"},
	} {
		if lower, upper := halves(netip.MustParsePrefix(in)); lower.String() != want[0] || upper.String() != want[1] {
			t.Errorf("%s: got %s and %s, want %v", in, lower, upper, want)
		}
	}
}

func TestConfigFaults(t *testing.T) {
	here, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for want, change := range map[string]func(*Config){
		"range 127.0.0.0/8":       func(c *Config) { c.Range = netip.MustParsePrefix("127.0.0.0/8") },
		"range 127.0.0.0/16":      func(c *Config) { c.Range = netip.MustParsePrefix("127.0.0.0/16") },
		"range 10.0.0.0/16":       func(c *Config) { c.Range = netip.MustParsePrefix("10.0.0.0/16") },
		`zone "foo bar"`:          func(c *Config) { c.Zone = "foo bar" },
		`zone "HELIX.local"`:      func(c *Config) { c.Zone = "HELIX.local" },
		`zone "local"`:            func(c *Config) { c.Zone = "local" },
		"ports \"some\"":          func(c *Config) { c.Ports = "some" },
		"the program helix-agent": func(c *Config) { c.Agent = "/nowhere" },
	} {
		c := Config{Helix: here, Agent: here}
		change(&c)
		if err := c.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v", want, err)
		}
	}
	good := Config{Helix: here, Agent: here}
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
}
