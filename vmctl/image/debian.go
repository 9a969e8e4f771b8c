package image

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
)

// sources are the files that a recipe packs.
type sources struct {
	kernel, modules, release, busybox string
	scratch                           string // "": nothing was unpacked
}

func (s *sources) close() {
	if s.scratch != "" {
		_ = os.RemoveAll(s.scratch) // the next build clears it
	}
}

const aptHint = "run apt-get update as root, or install the packages linux-image-cloud-%s and busybox-static"

// sources takes the installed kernel and busybox, and what is not installed from
// Debian's packages, which can be fetched and unpacked without being root.
func (b *build) sources(ctx context.Context) (_ *sources, err error) {
	stale, err := filepath.Glob(b.store.path("scratch-*"))
	if err != nil {
		return nil, fmt.Errorf("look for old builds: %w", err)
	}
	for _, dir := range stale { // ours alone: the store is locked
		if err := os.RemoveAll(dir); err != nil {
			return nil, fmt.Errorf("clear old build: %w", err)
		}
	}
	src := &sources{}
	defer func() {
		if err != nil {
			src.close()
		}
	}()
	flavour := "cloud-" + runtime.GOARCH
	boot, mods := or(b.cfg.BootDir, "/boot"), or(b.cfg.ModuleDir, "/lib/modules")
	kernel, modules, release, haveKernel := newestKernel(boot, mods, flavour)
	src.kernel, src.modules, src.release = kernel, modules, release
	src.busybox = b.installedBusybox()
	if haveKernel && src.busybox != "" {
		return src, nil
	}
	var packages []string
	if !haveKernel {
		packages = append(packages, "linux-image-"+flavour)
	}
	if src.busybox == "" {
		packages = append(packages, "busybox-static")
	}
	if src.scratch, err = os.MkdirTemp(b.store.root, "scratch-"); err != nil {
		return nil, fmt.Errorf("make scratch folder: %w", err)
	}
	if err := b.unpackPackages(ctx, packages, src.scratch); err != nil {
		return nil, &RecipeError{recipeTiny, err, fmt.Sprintf(aptHint, runtime.GOARCH)}
	}
	if !haveKernel {
		for _, lib := range []string{"lib/modules", "usr/lib/modules"} {
			src.kernel, src.modules, src.release, haveKernel = newestKernel(
				filepath.Join(src.scratch, "boot"), filepath.Join(src.scratch, lib), flavour)
			if haveKernel {
				break
			}
		}
		if !haveKernel {
			return nil, errors.New("the kernel package holds no kernel with modules")
		}
	}
	for _, path := range []string{"bin/busybox", "usr/bin/busybox"} {
		if full := filepath.Join(src.scratch, path); src.busybox == "" && isFile(full) {
			src.busybox = full
		}
	}
	if src.busybox == "" {
		return nil, errors.New("the busybox package holds no busybox")
	}
	return src, nil
}

// installedBusybox returns a static busybox of this machine, or "".
func (b *build) installedBusybox() string {
	if b.cfg.Busybox != "" {
		return b.cfg.Busybox
	}
	for _, path := range []string{"/bin/busybox", "/usr/bin/busybox"} {
		if _, err := readStatic(path); err == nil {
			return path
		}
	}
	return ""
}

// unpackPackages fetches Debian packages into the cache, where apt leaves those
// alone that are there and right, and unpacks them below dir.
func (b *build) unpackPackages(ctx context.Context, packages []string, dir string) error {
	cache, err := filepath.Abs(or(b.cfg.Cache, b.store.path("cache")))
	if err != nil {
		return fmt.Errorf("package cache: %w", err)
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return fmt.Errorf("package cache: %w", err)
	}
	for _, name := range packages {
		b.step("fetch package " + name)
		b.total++
		if name, err = realPackage(ctx, name); err != nil {
			return err
		}
		args := []string{"download", name}
		if os.Geteuid() == 0 { // else apt wants its own user to be able to write here
			args = append([]string{"-o", "APT::Sandbox::User=root"}, args...)
		}
		if _, err := run(ctx, cache, "apt-get", args...); err != nil {
			return err
		}
		deb, err := newestFile(filepath.Join(cache, name+"_*.deb"))
		if err != nil {
			return err
		}
		if _, err := run(ctx, cache, "dpkg-deb", "-x", deb, dir); err != nil {
			return err
		}
	}
	return nil
}

// realPackage resolves a kernel's meta package to the package of the kernel.
func realPackage(ctx context.Context, name string) (string, error) {
	if !strings.HasPrefix(name, "linux-image-") {
		return name, nil
	}
	out, err := run(ctx, "", "apt-cache", "depends", "--important", name)
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(out) {
		if real, ok := strings.CutPrefix(strings.TrimSpace(line), "Depends: "); ok && strings.HasPrefix(real, "linux-image-") {
			return real, nil
		}
	}
	return name, nil
}

func newestFile(pattern string) (string, error) {
	found, err := filepath.Glob(pattern)
	if err != nil {
		return "", fmt.Errorf("find %s: %w", pattern, err)
	}
	best := ""
	for _, path := range found {
		if best == "" || compareVersions(path, best) > 0 {
			best = path
		}
	}
	if best == "" {
		return "", fmt.Errorf("find %s: no such file after the download", pattern)
	}
	return best, nil
}

// run runs a program and returns its output; its complaints become the error.
func run(ctx context.Context, dir, program string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "LC_ALL=C", "DEBIAN_FRONTEND=noninteractive")
	var complaints bytes.Buffer
	cmd.Stderr = &complaints
	out, err := cmd.Output()
	if err != nil {
		if text := strings.TrimSpace(complaints.String()); text != "" {
			return "", fmt.Errorf("%s %s: %w: %s", program, strings.Join(args, " "), err, text)
		}
		return "", fmt.Errorf("%s %s: %w", program, strings.Join(args, " "), err)
	}
	return string(out), nil
}

func isFile(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular()
}

func or(value, fallback string) string {
	if value == "" {
		return fallback
	}
	return value
}
