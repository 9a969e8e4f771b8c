package vmctl

import (
	"context"
	"fmt"
	"os/exec"
	"regexp"
	"runtime"
	"strings"
	"time"

	"github.com/klauspost/cpuid/v2"
)

// Host is what a launch plan needs to know about the machine below.
type Host struct {
	OS          string `json:"os"`   // GOOS
	Arch        string `json:"arch"` // GOARCH
	CPUs        int    `json:"cpus"`
	QEMU        string `json:"qemu"` // path, "" when there is none
	QEMUVersion string `json:"qemu_version"`
	Disk        string `json:"mke2fs"` // path of mke2fs, "" when there is none
	KVM         KVM    `json:"kvm"`
	TSCKHz      int    `json:"tsc_khz,omitempty"` // 0: not known
}

// KVM says whether the host's hardware acceleration can be used. It stands for
// HVF on macOS and WHPX on Windows too.
type KVM struct {
	Usable bool   `json:"usable"`
	Reason string `json:"reason,omitempty"` // why not, one sentence
	Cure   string `json:"cure,omitempty"`   // what would help, "" when nothing would
}

// ProbeConfig overrides what ProbeHost looks for.
type ProbeConfig struct {
	QEMU string // path of QEMU, "": looked for in PATH
}

// ProbeHost looks at this machine. A missing QEMU is no error here: the plan says
// what to install.
func ProbeHost(ctx context.Context, cfg ProbeConfig) (Host, error) {
	h := Host{OS: runtime.GOOS, Arch: runtime.GOARCH, CPUs: runtime.NumCPU(), KVM: probeAccel()}
	h.QEMU = cfg.QEMU
	if h.QEMU == "" {
		h.QEMU = lookPath(qemuName(h.Arch))
	}
	h.Disk = lookPath("mke2fs")
	if h.QEMU != "" {
		out, err := exec.CommandContext(ctx, h.QEMU, "--version").Output()
		if err != nil {
			return h, fmt.Errorf("ask %s for its version: %w", h.QEMU, err)
		}
		h.QEMUVersion = parseVersion(string(out))
	}
	h.TSCKHz = measureTSC()
	return h, nil
}

// lookPath also looks where system programs are that are not in everybody's PATH.
func lookPath(name string) string {
	for _, dir := range []string{"", "/usr/sbin/", "/sbin/", "/opt/homebrew/opt/e2fsprogs/sbin/", "/usr/local/opt/e2fsprogs/sbin/"} {
		if path, err := exec.LookPath(dir + name); err == nil {
			return path
		}
	}
	return ""
}

func qemuName(arch string) string {
	switch arch {
	case "amd64":
		return "qemu-system-x86_64"
	case "arm64":
		return "qemu-system-aarch64"
	}
	return "qemu-system-" + arch
}

// parseVersion takes "7.2.22" out of what qemu --version prints.
func parseVersion(text string) string {
	m := regexp.MustCompile(`version (\d+(?:\.\d+)+)`).FindStringSubmatch(text)
	if m == nil {
		return strings.TrimSpace(text)
	}
	return m[1]
}

// measureTSC compares the time-stamp counter, which a guest under TCG sees as it
// is, with the clock. A tenth of a second would be exact; a guest needs only a
// first guess that is not far off, and a start should not wait.
func measureTSC() int {
	if runtime.GOARCH != "amd64" || !cpuid.CPU.Supports(cpuid.RDTSCP) {
		return 0
	}
	start, first := time.Now(), cpuid.CPU.RTCounter()
	timer := time.NewTimer(20 * time.Millisecond)
	<-timer.C
	ticks, took := cpuid.CPU.RTCounter()-first, time.Since(start)
	return int(float64(ticks) / took.Seconds() / 1000)
}
