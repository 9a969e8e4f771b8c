//go:build unix

package main

import (
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"helix.local/helix/gateway"
)

func upDefaults() upFlags {
	return upFlags{
		network: "127.88.0.0/16", zone: "helix.local", ports: "auto", grace: 10 * time.Second, logLevel: "info", logFormat: "text",
	}
}

func TestUpConfig(t *testing.T) {
	cfg, err := upDefaults().config("/state", "/opt/helix/helix")
	want := gateway.Config{
		State: "/state", Zone: "helix.local", Range: netip.MustParsePrefix("127.88.0.0/16"), Ports: gateway.PortsAuto,
		Helix: "/opt/helix/helix", Agent: "/opt/helix/helix-agent", Version: version, Grace: 10 * time.Second,
	}
	if err != nil || cfg.State != want.State || cfg.Range != want.Range || cfg.Ports != want.Ports || cfg.Agent != want.Agent ||
		cfg.Helix != want.Helix || cfg.Grace != want.Grace || cfg.Zone != want.Zone || cfg.Version != want.Version {
		t.Errorf("got %+v, %v, want %+v", cfg, err, want)
	}
	for name, spoil := range map[string]func(*upFlags){
		"--range":       func(f *upFlags) { f.network = "127.88.0.0" },
		"127.88.0.1/16": func(f *upFlags) { f.network = "127.88.0.1/16" },
		"--ports":       func(f *upFlags) { f.ports = "low" },
		"--grace":       func(f *upFlags) { f.grace = -1 },
	} {
		f := upDefaults()
		spoil(&f)
		if _, err := f.config("/state", "/helix"); err == nil || !strings.Contains(err.Error(), name) || exitCode(err) != exitUsage {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestUpLogger(t *testing.T) {
	for _, c := range []struct{ level, format, want string }{
		{"warn", "text", "level=WARN msg=loud"}, {"warn", "json", `"msg":"loud"`}, {"loud", "text", "--log-level"}, {"info", "xml", "--log-format"},
	} {
		var stderr strings.Builder
		a := &app{stderr: &stderr}
		log, err := a.logger(upFlags{logLevel: c.level, logFormat: c.format})
		got := ""
		if err != nil {
			got = err.Error()
		} else {
			log.Info("quiet")
			log.Warn("loud")
			got = stderr.String()
		}
		if !strings.Contains(got, c.want) || strings.Contains(got, "quiet") {
			t.Errorf("%s, %s: got %q, want %q", c.level, c.format, got, c.want)
		}
	}
}

func TestUpRefuses(t *testing.T) {
	for args, want := range map[string]string{
		"up --range nonsense":             "--range",
		"up --log-level loud":             "--log-level",
		"up --ports low":                  "--ports",
		"up --agent /nowhere/helix-agent": "helix-agent",
		"up extra":                        "one argument too many",
	} {
		got := call{state: shortDir(t)}.run(t.Context(), strings.Fields(args)...)
		if got.code == 0 || !strings.Contains(got.stderr, want) {
			t.Errorf("%s: got %+v, want %q", args, got, want)
		}
	}
}

func TestNotify(t *testing.T) {
	for _, name := range []string{filepath.Join(shortDir(t), "n"), "@helix-test-" + itoa(int(time.Now().UnixNano()))} {
		address := &net.UnixAddr{Name: strings.Replace(name, "@", "\x00", 1), Net: "unixgram"}
		conn, err := net.ListenUnixgram("unixgram", address)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if err := notify(name, "READY=1"); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 32)
		n, err := conn.Read(buf)
		if err != nil || string(buf[:n]) != "READY=1" {
			t.Errorf("%s: got %q, %v", name, buf[:n], err)
		}
	}
	if err := notify("", "READY=1"); err != nil {
		t.Errorf("nobody to tell: %v", err)
	}
	if err := notify("/nowhere/socket", "READY=1"); err == nil {
		t.Error("a manager that is not there was told")
	}
}

func TestInvokerHome(t *testing.T) {
	t.Setenv("HOME", "/home/somebody")
	var stderr strings.Builder
	a := &app{stderr: &stderr, getenv: func(string) string { return "" }}
	log, err := a.logger(upDefaults())
	if err != nil {
		t.Fatal(err)
	}
	if got := a.invokerHome(log); got != "/home/somebody" {
		t.Errorf("home is %q", got)
	}
}
