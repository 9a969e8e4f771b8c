package image

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/cavaliergopher/cpio"
)

// ModuleList is the file in a guest that names the kernel modules to load, one
// path a line, each after those it depends on.
const ModuleList = "/lib/helix/modules"

// archive writes an initramfs. Everything in it belongs to root and has the time
// zero, so that the same content gives the same bytes.
type archive struct {
	w    *cpio.Writer
	dirs map[string]bool
	errs []error
}

func newArchive(w io.Writer) *archive {
	return &archive{w: cpio.NewWriter(w), dirs: map[string]bool{".": true, "/": true}}
}

// dir adds a folder and those above it. mode holds for the folder itself.
func (a *archive) dir(name string, mode cpio.FileMode) {
	name = strings.Trim(path.Clean(name), "/")
	if name == "" || a.dirs[name] || a.dirs["/"+name] {
		return
	}
	if up := path.Dir(name); !a.dirs[up] {
		a.dir(up, 0o755)
	}
	a.dirs[name] = true
	a.put(&cpio.Header{Name: name, Mode: cpio.TypeDir | mode, Links: 2}, nil)
}

func (a *archive) file(name string, mode cpio.FileMode, body []byte) {
	a.dir(path.Dir(name), 0o755)
	a.put(&cpio.Header{Name: strings.TrimPrefix(name, "/"), Mode: cpio.TypeReg | mode, Size: int64(len(body))}, body)
}

func (a *archive) link(name, target string) {
	a.dir(path.Dir(name), 0o755)
	a.put(&cpio.Header{Name: strings.TrimPrefix(name, "/"), Mode: cpio.TypeSymlink | 0o777, Size: int64(len(target)), Links: 1}, []byte(target))
}

func (a *archive) put(h *cpio.Header, body []byte) {
	h.ModTime = time.Unix(0, 0)
	if err := a.w.WriteHeader(h); err != nil {
		a.errs = append(a.errs, fmt.Errorf("add %s: %w", h.Name, err))
		return
	}
	if _, err := a.w.Write(body); err != nil {
		a.errs = append(a.errs, fmt.Errorf("add %s: %w", h.Name, err))
	}
}

func (a *archive) close() error { return errors.Join(append(a.errs, a.w.Close())...) }

// tinyFiles is the fixed part of the tiny guest.
func tinyFiles() map[string]string {
	return map[string]string{
		"/etc/passwd":     "root:x:0:0:root:/root:/bin/sh\nhelix:x:1000:1000:helix:/home/helix:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
		"/etc/group":      "root:x:0:\ntty:x:5:\nhelix:x:1000:\nnogroup:x:65534:\n",
		"/etc/shadow":     "root:*:19000:0:99999:7:::\nhelix:*:19000:0:99999:7:::\n",
		"/etc/hosts":      "127.0.0.1 localhost\n::1 localhost\n",
		"/etc/shells":     "/bin/sh\n",
		"/etc/profile":    "export PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin\n[ \"$(id -u)\" = 0 ] && PS1='\\h:\\w# ' || PS1='\\h:\\w$ '\n",
		"/etc/os-release": "NAME=\"Helix tiny\"\nID=helix-tiny\n",
	}
}

// tinyInitramfs packs the root file system of the tiny image. applets are the
// paths, without leading slash, that lead to busybox.
func tinyInitramfs(agent, busybox []byte, applets []string, modules []module) ([]byte, error) {
	var out bytes.Buffer
	a := newArchive(&out)
	for _, name := range []string{"dev", "proc", "sys", "run", "mnt", "usr/bin", "usr/sbin", "usr/local/bin", "sbin", "var/log", "workspace"} {
		a.dir(name, 0o755)
	}
	a.dir("tmp", 0o1777)
	a.dir("root", 0o700)
	a.dir("home", 0o755)
	a.dirs["home/helix"] = true
	a.put(&cpio.Header{Name: "home/helix", Mode: cpio.TypeDir | 0o755, Links: 2, Uid: 1000, Guid: 1000}, nil)
	files := tinyFiles()
	for _, name := range slices.Sorted(maps.Keys(files)) {
		mode := cpio.FileMode(0o644)
		if name == "/etc/shadow" {
			mode = 0o600
		}
		a.file(name, mode, []byte(files[name]))
	}
	a.file("init", 0o755, agent)
	a.link("usr/bin/helix-agent", "/init")
	a.file("bin/busybox", 0o755, busybox)
	for _, name := range slices.Sorted(slices.Values(applets)) {
		if name != "bin/busybox" && name != "linuxrc" {
			a.link(name, "/bin/busybox")
		}
	}
	var list strings.Builder
	for _, m := range modules {
		name := "/lib/helix/modules.d/" + m.name + ".ko"
		a.file(name, 0o644, m.body)
		fmt.Fprintln(&list, name)
	}
	a.file(ModuleList, 0o644, []byte(list.String()))
	if err := a.close(); err != nil {
		return nil, fmt.Errorf("pack initramfs: %w", err)
	}
	return out.Bytes(), nil
}
