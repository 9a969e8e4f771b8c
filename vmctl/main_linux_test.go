package vmctl

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"helix.local/helix/vmctl/guestnet"
)

// TestMain also plays the program whose "vmshim PLAN" is the shim, so that the
// tests start what ships.
func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == "vmshim" {
		cfg := ShimConfig{}
		if from, to, ok := strings.Cut(os.Getenv("VMCTL_TEST_DIVERT"), "="); ok {
			cfg.Network = func(c guestnet.Config) guestnet.Config {
				c.Divert = func(a netip.AddrPort) (netip.AddrPort, bool) { return netip.MustParseAddrPort(to), a.String() == from }
				return c
			}
		}
		if err := RunShim(context.Background(), os.Args[2], cfg); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if len(os.Args) > 2 && os.Args[1] == "fakeqemu" {
		if err := fakeQEMU(os.Args[2], os.Args[3:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if len(os.Args) == 4 && os.Args[1] == "startanddie" {
		startAndDie(os.Args[2], Step(os.Args[3]))
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		if imageDir != "" {
			_ = os.RemoveAll(imageDir) // the temporary folder is cleared sometime anyway
		}
		os.Exit(code)
	}))
}

// startAndDie starts a plan and kills its own process when a step begins, as a
// gateway may be killed.
func startAndDie(plan string, at Step) {
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	p, err := ReadPlan(plan)
	if err != nil {
		panic(err)
	}
	_, err = Start(context.Background(), p, StartConfig{Helix: self, Boot: []byte("{}"), Progress: func(e StepEvent) {
		if e.Step == at && !e.Done {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		}
	}})
	panic(err)
}

// fakeQEMU speaks just enough of the machine protocol to misbehave in it.
func fakeQEMU(mode string, args []string) error {
	value := func(prefix string) string {
		for _, a := range args {
			if rest, ok := strings.CutPrefix(a, prefix); ok {
				return strings.SplitN(rest, ",", 2)[0]
			}
		}
		return ""
	}
	ln, err := net.Listen("unix", value("socket,id=qmp,path="))
	if err != nil {
		return err
	}
	conn, err := ln.Accept()
	if err != nil {
		return err
	}
	if mode == "mute" {
		select {}
	}
	if _, err := io.WriteString(conn, `{"QMP":{"version":{"qemu":{"micro":0,"minor":2,"major":7}},"capabilities":[]}}`+"\n"); err != nil {
		return err
	}
	in := json.NewDecoder(conn)
	for {
		var command struct{ Execute string }
		if err := in.Decode(&command); err != nil {
			return err
		}
		reply := `{"return":{}}`
		switch {
		case command.Execute != "human-monitor-command":
		case mode == "refuse":
			reply = `{"error":{"class":"GenericError","desc":"no such monitor"}}`
		default: // a card that nobody planned
			reply = `{"return":"nic0: index=0,type=nic,model=e1000,macaddr=52:54:00:12:34:56\r\n \\ u: index=0,type=user,net=10.0.2.0\r\n"}`
		}
		if _, err := io.WriteString(conn, reply+"\n"); err != nil {
			return err
		}
	}
}

// buildGuest compiles the guest program of the tests.
func buildGuest(t testing.TB) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), "guest")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", out, "./testdata/guest")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build guest: %v\n%s", err, text)
	}
	return out
}
