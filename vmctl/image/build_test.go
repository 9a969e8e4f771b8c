package image

import (
	"bytes"
	"compress/gzip"
	"debug/elf"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cavaliergopher/cpio"
	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
)

// tinyELF is the least that passes for a kernel with a PVH note.
func tinyELF(t testing.TB, note uint32) []byte {
	t.Helper()
	var out bytes.Buffer
	const headers = 64 + 56
	notes := binary.LittleEndian.AppendUint32(nil, 4)
	notes = binary.LittleEndian.AppendUint32(notes, 8)
	notes = binary.LittleEndian.AppendUint32(notes, note)
	notes = append(append(notes, "Xen\x00"...), make([]byte, 8)...)
	h := elf.Header64{Type: uint16(elf.ET_EXEC), Machine: uint16(elf.EM_X86_64), Version: 1, Phoff: 64, Ehsize: 64, Phentsize: 56, Phnum: 1}
	copy(h.Ident[:], "\x7fELF\x02\x01\x01")
	p := elf.Prog64{Type: uint32(elf.PT_NOTE), Off: headers, Filesz: uint64(len(notes))}
	for _, part := range []any{h, p, notes} {
		if err := binary.Write(&out, binary.LittleEndian, part); err != nil {
			t.Fatal(err)
		}
	}
	return out.Bytes()
}

// bzImage wraps a packed kernel as Linux does.
func bzImage(packed []byte) []byte {
	image := make([]byte, 1024) // boot sector and one of setup
	image[0x1f1] = 1
	copy(image[0x202:], "HdrS")
	binary.LittleEndian.PutUint32(image[0x24c:], uint32(len(packed)))
	return append(image, packed...)
}

func packs(t testing.TB, kernel []byte) map[string][]byte {
	t.Helper()
	size := binary.LittleEndian.AppendUint32(nil, uint32(len(kernel)))
	var gz bytes.Buffer
	w := gzip.NewWriter(&gz)
	if _, err := w.Write(kernel); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	zw, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	block := make([]byte, lz4.CompressBlockBound(len(kernel)))
	var c lz4.Compressor
	n, err := c.CompressBlock(kernel, block)
	if err != nil {
		t.Fatal(err)
	}
	legacy := binary.LittleEndian.AppendUint32([]byte{0x02, 0x21, 0x4c, 0x18}, uint32(n))
	return map[string][]byte{
		"gzip": gz.Bytes(),
		"zstd": append(zw.EncodeAll(kernel, nil), size...),
		"lz4":  append(append(legacy, block[:n]...), size...),
	}
}

func TestExtractVmlinux(t *testing.T) {
	kernel := append(tinyELF(t, 18), make([]byte, 4096)...)
	for name, packed := range packs(t, kernel) {
		got, err := extractVmlinux(bzImage(packed))
		if err != nil || !bytes.Equal(got, kernel) {
			t.Errorf("%s: %d bytes, %v", name, len(got), err)
		}
	}
	for name, c := range map[string]struct {
		image []byte
		text  string
	}{
		"empty":       {nil, "not a bzImage"},
		"outside":     {bzImage(make([]byte, 100))[:1030], "outside"},
		"huge":        {bzImage(bytes.Repeat([]byte{0xff}, 64)), "too large"},
		"unknown":     {bzImage(append([]byte("BZh91AY&SY"), 1, 0, 0, 0)), "unknown kernel compression"},
		"cut":         {bzImage(append([]byte{0x02, 0x21, 0x4c, 0x18, 0xff, 0, 0, 0}, 9, 0, 0, 0)), "unexpected EOF"},
		"without PVH": {bzImage(packs(t, append(tinyELF(t, 6), make([]byte, 4096)...))["lz4"]), "no PVH entry"},
		"not ELF":     {bzImage(packs(t, make([]byte, 4096))["zstd"]), "read kernel"},
	} {
		if _, err := extractVmlinux(c.image); err == nil || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v, want %q", name, err, c.text)
		}
	}
}

func FuzzExtractVmlinux(f *testing.F) {
	for _, packed := range packs(f, append(tinyELF(f, 18), make([]byte, 512)...)) {
		f.Add(bzImage(packed))
	}
	f.Add([]byte("HdrS"))
	f.Fuzz(func(t *testing.T, image []byte) {
		if len(image) > 1<<20 {
			return
		}
		if size := len(image); size >= 4 && binary.LittleEndian.Uint32(image[size-4:]) > 1<<24 {
			return // allowed, and slow
		}
		if kernel, err := extractVmlinux(image); err == nil && checkPVH(kernel) != nil {
			t.Error("a kernel without entry point was taken")
		}
	})
}

func FuzzDependsOf(f *testing.F) {
	f.Add(tinyELF(f, 1))
	f.Fuzz(func(_ *testing.T, body []byte) {
		_, _ = dependsOf(body) // it must not panic
	})
}

func TestCompareVersions(t *testing.T) {
	list := []string{"6.10.0-1", "6.1.0-9-cloud", "6.1.0-57-cloud", "5.10.0", "6.1.0-50-cloud", "6.1"}
	slices.SortFunc(list, compareVersions)
	if got := strings.Join(list, " "); got != "5.10.0 6.1 6.1.0-9-cloud 6.1.0-50-cloud 6.1.0-57-cloud 6.10.0-1" {
		t.Errorf("order is %s", got)
	}
}

// program builds a static program to play the agent.
func program(t *testing.T) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), "agent")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", out, "../testdata/guest")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build agent: %v\n%s", err, text)
	}
	return out
}

func TestBuildTiny(t *testing.T) {
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	s := openStore(t)
	stale := s.path("scratch-old")
	if err := os.Mkdir(stale, 0o700); err != nil {
		t.Fatal(err)
	}
	var steps []string
	cfg := BuildConfig{Agent: program(t), Cache: filepath.Join(cache, "helix-test"), Progress: func(p Progress) { steps = append(steps, p.Step) }}
	img, err := s.Build(t.Context(), "tiny", cfg)
	if err != nil {
		t.Fatal(err)
	}
	again, err := s.Build(t.Context(), "tiny", cfg)
	if err != nil || again.Digest != img.Digest {
		t.Errorf("second build: digest %s and %s, %v", img.Digest, again.Digest, err)
	}
	if img.Name != "tiny:latest" || img.Meta.Kernel == "" || len(steps) < 6 || steps[len(steps)-1] != "done" {
		t.Errorf("image is %+v after %v", img, steps)
	}
	if left, err := filepath.Glob(s.path("scratch-*")); err != nil || len(left) > 0 {
		t.Errorf("scratch folders left: %v, %v", left, err)
	}
	checkInitramfs(t, img.Initramfs)
}

// checkInitramfs looks into the archive for what a guest counts on.
func checkInitramfs(t *testing.T, path string) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r := cpio.NewReader(f)
	have := map[string]*cpio.Header{}
	var list string
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if have["/"+h.Name] != nil {
			t.Errorf("%s is there twice", h.Name)
		}
		have["/"+h.Name] = h
		if "/"+h.Name == ModuleList {
			body, err := io.ReadAll(r)
			if err != nil {
				t.Fatal(err)
			}
			list = string(body)
		}
	}
	for _, name := range []string{"/init", "/bin/sh", "/bin/busybox", "/etc/passwd", "/home/helix", "/tmp", "/dev", "/proc", "/sys", "/workspace"} {
		if have[name] == nil {
			t.Errorf("%s is missing", name)
		}
	}
	if h := have["/home/helix"]; h != nil && h.Uid != 1000 {
		t.Errorf("/home/helix belongs to %d", h.Uid)
	}
	modules := strings.Fields(list)
	at := func(name string) int {
		return slices.IndexFunc(modules, func(m string) bool { return filepath.Base(m) == name+".ko" })
	}
	for _, pair := range [][2]string{{"virtio_ring", "virtio"}, {"virtio", "virtio_mmio"}, {"net_failover", "virtio_net"}, {"virtio_mmio", "virtio_console"}} {
		if at(pair[0]) < 0 || at(pair[0]) > at(pair[1]) {
			t.Errorf("%s does not come before %s in %v", pair[0], pair[1], modules)
		}
	}
	for _, m := range modules {
		if have[m] == nil {
			t.Errorf("module %s is listed and missing", m)
		}
	}
}

func TestBuildRefuses(t *testing.T) {
	s := openStore(t)
	script := filepath.Join(t.TempDir(), "script")
	if err := os.WriteFile(script, []byte("#!/bin/sh\n"+strings.Repeat("#", 100)), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		recipe string
		cfg    BuildConfig
		text   string
		hint   string
	}{
		"recipe":        {"huge", BuildConfig{}, "no such recipe", "tiny"},
		"no agent":      {"tiny", BuildConfig{}, "no program given", ""},
		"missing agent": {"tiny", BuildConfig{Agent: "/nonexistent"}, "no such file", ""},
		"dynamic agent": {"tiny", BuildConfig{Agent: "/bin/sh"}, "not statically linked", ""},
		"script":        {"tiny", BuildConfig{Agent: script}, "bad magic", ""},
	} {
		_, err := s.Build(t.Context(), c.recipe, c.cfg)
		var failed *RecipeError
		if !errors.As(err, &failed) || !strings.Contains(err.Error(), c.text) || !strings.Contains(failed.Hint(), c.hint) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := run(t.Context(), "", "sh", "-c", "echo no >&2; exit 4"); err == nil || !strings.Contains(err.Error(), "exit status 4: no") {
		t.Errorf("a program that fails gave %v", err)
	}
}

func TestInstalledKernelIsPreferred(t *testing.T) {
	dir := t.TempDir()
	for _, v := range []string{"6.1.0-9", "6.1.0-10", "7.0.0-1"} {
		if err := os.WriteFile(filepath.Join(dir, "vmlinuz-"+v+"-cloud-amd64"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if v != "7.0.0-1" { // that one has no modules
			if err := os.MkdirAll(filepath.Join(dir, v+"-cloud-amd64", "kernel"), 0o700); err != nil {
				t.Fatal(err)
			}
		}
	}
	_, modules, release, ok := newestKernel(dir, dir, "cloud-amd64")
	if !ok || release != "6.1.0-10-cloud-amd64" || filepath.Base(modules) != release {
		t.Errorf("kernel %s in %s, %v", release, modules, ok)
	}
	if _, _, _, ok := newestKernel(t.TempDir(), dir, "cloud-amd64"); ok {
		t.Error("a kernel was found in an empty folder")
	}
}

func TestReadModuleCompressed(t *testing.T) {
	dir := t.TempDir()
	body := []byte("module")
	pack := packs(t, append(body, make([]byte, 64)...))
	for name, c := range map[string]struct {
		body []byte
		ok   bool
	}{"a.ko": {body, true}, "a.ko.gz": {pack["gzip"], true}, "a.ko.zst": {pack["zstd"][:len(pack["zstd"])-4], true}, "a.ko.xz": {body, false}, "b.ko.gz": {body, false}} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, c.body, 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := readModule(path)
		if (err == nil) != c.ok || c.ok && !bytes.HasPrefix(got, body) {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}

func TestUnsigned(t *testing.T) {
	header := []byte{0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 3} // PKCS#7, three bytes of signature
	signed := append(append([]byte("module"), "sig"...), header...)
	cases := map[string]struct{ in, want string }{
		"signed":      {string(signed) + signatureMark, "module"},
		"not signed":  {"module", "module"},
		"mark alone":  {signatureMark, signatureMark},
		"wrong size":  {"x\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff" + signatureMark, "x\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff" + signatureMark},
		"nothing":     {"", ""},
		"mark inside": {signatureMark + "x", signatureMark + "x"},
	}
	for name, c := range cases {
		if got := string(unsigned([]byte(c.in))); got != c.want {
			t.Errorf("%s: got %q, want %q", name, got, c.want)
		}
	}
}
