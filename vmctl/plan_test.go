package vmctl

import (
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"helix.local/helix/vmctl/guestnet"
	"helix.local/helix/vmctl/image"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// planCase is a machine and a host as no test machine need be.
func planCase(goos, arch string, hardware bool) (Machine, Host) {
	run, qemu := "/home/ann/.local/state/helix", "/usr/bin/"+qemuName(arch)
	format := image.FormatPVH
	if arch == "arm64" {
		format = image.FormatImage
	}
	switch goos {
	case "darwin":
		run, qemu = "/Users/ann/.local/state/helix", "/opt/homebrew/bin/"+qemuName(arch)
	case "windows":
		run, qemu = `C:\Users\ann\helix`, `C:\Program Files\qemu\`+qemuName(arch)+".exe"
	}
	sep := "/"
	if goos == "windows" {
		sep = `\`
	}
	at := func(parts ...string) string { return strings.Join(append([]string{run}, parts...), sep) }
	m := Machine{
		Name: "demo", UUID: "6f1c1f54-6f39-4c57-9d0e-0123456789ab", Generation: 3, RunDir: at("vm", "demo"), LinkSocket: at("links.sock"),
		Image: image.Image{
			Name: "tiny:latest", Digest: "sha256:1111", Kernel: at("images", "kernel"), Initramfs: at("images", "initramfs"),
			Meta: image.Meta{Arch: arch, KernelFormat: format},
		},
	}
	h := Host{OS: goos, Arch: arch, CPUs: 8, QEMU: qemu, QEMUVersion: "7.2.22", Disk: "/usr/sbin/mke2fs", KVM: KVM{Usable: hardware}}
	if !hardware {
		h.KVM = KVM{Reason: "/dev/kvm is not there", Cure: "load the module"}
	}
	if arch == "amd64" {
		h.TSCKHz = 2300000
	}
	return m, h
}

func TestPlanGolden(t *testing.T) {
	for name, c := range map[string]struct {
		os, arch string
		hardware bool
	}{
		"linux-amd64-kvm":    {"linux", "amd64", true},
		"linux-amd64-tcg":    {"linux", "amd64", false},
		"linux-arm64-kvm":    {"linux", "arm64", true},
		"linux-arm64-tcg":    {"linux", "arm64", false},
		"darwin-arm64-hvf":   {"darwin", "arm64", true},
		"darwin-amd64-hvf":   {"darwin", "amd64", true},
		"windows-amd64-whpx": {"windows", "amd64", true},
	} {
		t.Run(name, func(t *testing.T) {
			p, err := NewPlan(planCase(c.os, c.arch, c.hardware))
			if err != nil {
				t.Fatal(err)
			}
			got, err := json.MarshalIndent(p, "", "  ")
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, '\n')
			path := filepath.Join("testdata", "plans", name+".golden")
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
				t.Errorf("plan is\n%s\nwant\n%s", got, want)
			}
		})
	}
}

func TestPlanRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Machine, *Host)
		text   string
		hint   string
	}{
		"no QEMU":          {func(_ *Machine, h *Host) { h.QEMU = "" }, "qemu-system-x86_64 is not installed", "apt-get install qemu-system-x86"},
		"KVM asked":        {func(m *Machine, _ *Host) { m.Accel = AccelKVM }, "hardware acceleration was asked for", "load the module"},
		"odd accelerator":  {func(m *Machine, _ *Host) { m.Accel = "xen" }, `accelerator "xen" is not known`, ""},
		"bad name":         {func(m *Machine, _ *Host) { m.Name = "a,b" }, "not a DNS label", ""},
		"bad UUID":         {func(m *Machine, _ *Host) { m.UUID = "1" }, `uuid "1"`, ""},
		"relative folder":  {func(m *Machine, _ *Host) { m.RunDir = "vm" }, "not absolute", ""},
		"little memory":    {func(m *Machine, _ *Host) { m.MemoryMB = 64 }, "too few", ""},
		"many processors":  {func(m *Machine, _ *Host) { m.CPUs = 1000 }, "1000 processors", ""},
		"negative disk":    {func(m *Machine, _ *Host) { m.DiskGB = -1 }, "disk of -1 GB", ""},
		"unknown policy":   {func(m *Machine, _ *Host) { m.Policy = "all" }, `network policy "all"`, ""},
		"image incomplete": {func(m *Machine, _ *Host) { m.Image.Kernel = "" }, "no kernel", ""},
		"long path":        {func(m *Machine, _ *Host) { m.RunDir = "/" + strings.Repeat("x", 100) }, "the system allows 107", "shorter path"},
	} {
		t.Run(name, func(t *testing.T) {
			m, h := planCase("linux", "amd64", false)
			c.change(&m, &h)
			_, err := NewPlan(m, h)
			if err == nil || !strings.Contains(err.Error(), c.text) {
				t.Fatalf("error is %v, want %q in it", err, c.text)
			}
			if got := hintFor(err); c.hint != "" && !strings.Contains(got, c.hint) {
				t.Errorf("hint is %q, want %q in it", got, c.hint)
			}
		})
	}
}

func TestPlanDefaultsAndChoices(t *testing.T) {
	m, h := planCase("linux", "amd64", true)
	p, err := NewPlan(m, h)
	if err != nil || p.Accel != "kvm" || p.Warning != "" || p.Machine != "microvm" || p.Network.Policy != guestnet.PolicyInternet {
		t.Errorf("with KVM: %+v, %v", p, err)
	}
	m.Accel = AccelTCG
	if p, err = NewPlan(m, h); err != nil || p.Accel != "tcg" || p.Warning != "" {
		t.Errorf("TCG by choice needs no warning: %+v, %v", p, err)
	}
	m.Accel = AccelAuto
	slow, err := NewPlan(planCase("linux", "amd64", false))
	if err != nil || !strings.Contains(slow.Warning, "/dev/kvm is not there") || slow.Steps[0].Timeout != 4*5*time.Second {
		t.Errorf("without KVM: %+v, %v", slow, err)
	}
	m, h = planCase("linux", "amd64", false)
	h.TSCKHz = 0
	if p, err = NewPlan(m, h); err != nil || p.Machine != "q35" {
		t.Errorf("TCG with unknown clock: machine %s, %v", p.Machine, err)
	}
	other := m
	other.UUID = "6f1c1f54-6f39-4c57-9d0e-0123456789ac"
	if macFor(m.UUID) == macFor(other.UUID) || macFor(m.UUID) != p.Network.MAC {
		t.Errorf("hardware addresses %s and %s", macFor(m.UUID), macFor(other.UUID))
	}
	if got := escape("/a,b"); got != "/a,,b" {
		t.Errorf("escape gave %q", got)
	}
}

func TestParseCards(t *testing.T) {
	const one = "nic0: index=0,type=nic,model=virtio-net-device,macaddr=52:48:00:11:22:33\r\n \\ net0: index=0,type=stream,unix:/run/a,b/net.sock\r\n"
	want := Network{NIC: "nic0", NetDev: "net0", MAC: "52:48:00:11:22:33"}
	if err := compareNetwork(want, "/run/a,b/net.sock", parseCards(one)); err != nil {
		t.Error(err)
	}
	for name, c := range map[string]struct{ text, fault string }{
		"none":        {"", "0 cards"},
		"two":         {one + "nic1: index=0,type=nic,model=e1000,macaddr=52:54:00:12:34:56\r\n", "2 cards"},
		"stray":       {one + "hub0: index=0,type=user,net=10.0.2.0,restrict=off\r\n", "2 cards"},
		"user net":    {strings.Replace(one, "type=stream,unix:/run/a,b/net.sock", "type=user,net=10.0.2.0", 1), `backend type is "user"`},
		"other cable": {strings.Replace(one, "net.sock", "evil.sock", 1), "planned is a connection"},
		"other MAC":   {strings.Replace(one, "11:22:33", "44:55:66", 1), "hardware address"},
		"unplugged":   {strings.SplitAfter(one, "\r\n")[0], `backend is ""`},
	} {
		t.Run(name, func(t *testing.T) {
			err := compareNetwork(want, "/run/a,b/net.sock", parseCards(c.text))
			if err == nil || !strings.Contains(err.Error(), c.fault) {
				t.Errorf("error is %v, want %q in it", err, c.fault)
			}
		})
	}
}

func FuzzParseCards(f *testing.F) {
	f.Add("nic0: index=0,type=nic,model=virtio-net-device,macaddr=52:48:00:11:22:33\r\n \\ net0: index=0,type=stream,unix:/x\r\n")
	f.Add(" \\ : ,,=,\n: \n")
	f.Fuzz(func(t *testing.T, text string) {
		for _, c := range parseCards(text) {
			if strings.ContainsAny(c.name, "\n") {
				t.Errorf("name %q spans lines", c.name)
			}
		}
	})
}

func TestHints(t *testing.T) {
	cure := &CureError{errors.New("x"), "do y"}
	for _, c := range []struct {
		err  error
		want string
	}{
		{nil, ""},
		{errors.New("x"), ""},
		{cure, "do y"},
		{ErrRunning, "adopt"},
		{&os.PathError{Op: "open", Path: "x", Err: os.ErrPermission}, "who owns"},
	} {
		if got := hintFor(c.err); !strings.Contains(got, c.want) || (c.want == "") != (got == "") {
			t.Errorf("hint for %v is %q, want %q in it", c.err, got, c.want)
		}
	}
	step := &StepError{Machine: "demo", Step: StepDisk, Err: cure}
	if step.Error() != "start demo: disk: x" || step.Hint() != "do y" || !errors.Is(step, cure) {
		t.Errorf("step error is %v, hint %q", step, step.Hint())
	}
}
