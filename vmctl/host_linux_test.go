package vmctl

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestJudgeKVM(t *testing.T) {
	const plain, vmx = "processor: 0\nflags\t\t: fpu vme\n", "flags\t\t: fpu vmx\n"
	for name, c := range map[string]struct {
		arch, info string
		open       error
		usable     bool
		text       string
	}{
		"usable":         {"amd64", vmx, nil, true, ""},
		"AMD":            {"amd64", "flags : svm\n", nil, true, ""},
		"arm64":          {"arm64", "", nil, true, ""},
		"device alone":   {"amd64", plain, nil, false, "neither vmx nor svm, so it cannot"},
		"no hardware":    {"amd64", plain, fs.ErrNotExist, false, "firmware"},
		"permission":     {"amd64", vmx, &os.PathError{Op: "open", Path: "/dev/kvm", Err: unix.EACCES}, false, "group \"kvm\""},
		"not loaded":     {"amd64", vmx, unix.ENOENT, false, "modprobe"},
		"busy":           {"amd64", vmx, unix.EBUSY, false, "other hypervisor"},
		"something else": {"amd64", vmx, errors.New("odd"), false, "odd"},
	} {
		got := judgeKVM(c.arch, c.info, c.open)
		if got.Usable != c.usable || !strings.Contains(got.Reason+" "+got.Cure, c.text) {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

func TestProbeHost(t *testing.T) {
	h, err := ProbeHost(t.Context(), ProbeConfig{})
	if err != nil || h.QEMU == "" || !strings.Contains(h.QEMUVersion, ".") || h.CPUs < 1 {
		t.Errorf("host is %+v, %v", h, err)
	}
	if h.Arch == "amd64" && (h.TSCKHz < 500_000 || h.TSCKHz > 10_000_000) {
		t.Errorf("clock is %d kHz", h.TSCKHz)
	}
	if _, err := ProbeHost(t.Context(), ProbeConfig{QEMU: "/bin/false"}); err == nil {
		t.Error("a QEMU that fails was taken")
	}
	if got := parseVersion("QEMU emulator version 7.2.22 (Debian 1:7.2)"); got != "7.2.22" {
		t.Errorf("version is %q", got)
	}
	if got := parseVersion("what?\n"); got != "what?" {
		t.Errorf("version is %q", got)
	}
}

func TestFilesOnDisk(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "plan.json")
	if err := writeJSON(path, Plan{Version: PlanVersion + 1}); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadPlan(path); err == nil || !strings.Contains(err.Error(), "version 2") {
		t.Errorf("a newer plan gave %v", err)
	}
	if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadPlan(path); err == nil {
		t.Error("a broken plan was read")
	}
	if _, err := Adopt(t.Context(), dir, "x", 1); err == nil || errors.Is(err, ErrNotRunning) {
		t.Errorf("adopt with a broken plan gave %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "exit.json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadExit(dir); err == nil || errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a broken exit gave %v", err)
	}
	if err := writeJSON(filepath.Join(dir, "no", "x"), 1); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("write without folder gave %v", err)
	}
	if err := writeJSON(path, func() {}); err == nil {
		t.Error("a function was encoded")
	}
	disk := Disk{Path: filepath.Join(dir, "a[1]", "workspace.img"), Bytes: 64 << 20, Label: "helix-ws", Make: lookPath("mke2fs")}
	if err := os.Mkdir(filepath.Dir(disk.Path), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, size := range []int64{64 << 20, 128 << 20, 32 << 20} { // made, grown, never shrunk
		disk.Bytes = size
		if err := makeDisk(t.Context(), disk); err != nil {
			t.Fatal(err)
		}
		if info, err := os.Stat(disk.Path); err != nil || info.Size() != max(size, 64<<20) && info.Size() != 128<<20 {
			t.Errorf("disk of %d bytes is %v, %v", size, info, err)
		}
	}
	var stat unix.Stat_t
	if err := unix.Stat(disk.Path, &stat); err != nil || stat.Blocks*512 > 16<<20 {
		t.Errorf("disk uses %d bytes, %v", stat.Blocks*512, err)
	}
	if err := os.WriteFile(filepath.Join(dir, "a[1]", "x.sock"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if list, err := transient(filepath.Join(dir, "a[1]")); err != nil || len(list) != 1 {
		t.Errorf("transient files are %v, %v", list, err)
	}
}
