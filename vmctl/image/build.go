package image

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
)

// Progress hears how far a build is. Done and Total count steps.
type Progress struct {
	Step        string
	Done, Total int
}

// BuildConfig says what to build from. Agent is needed; the rest has defaults.
type BuildConfig struct {
	Agent     string         // path of the agent program for the guest, static
	Name      string         // "": the recipe's name
	BootDir   string         // installed kernels, "": /boot
	ModuleDir string         // installed modules, "": /lib/modules
	Busybox   string         // static busybox, "": looked for in the usual places
	Cache     string         // folder for downloaded packages, "": "cache" in the store
	Progress  func(Progress) // nil: nobody listens
}

// ErrNoRecipe reports a name that is no recipe's.
var ErrNoRecipe = errors.New("no such recipe")

// RecipeError reports a recipe that cannot be followed on this machine.
type RecipeError struct {
	Recipe string
	Err    error
	hint   string
}

func (e *RecipeError) Error() string { return fmt.Sprintf("build image %s: %v", e.Recipe, e.Err) }

func (e *RecipeError) Unwrap() error { return e.Err }

// Hint says what would help, or "".
func (e *RecipeError) Hint() string { return e.hint }

// recipeTiny is Debian's cloud kernel with an initramfs of busybox and the agent.
const recipeTiny = "tiny"

// Build makes the image that recipe describes and stores it. The same inputs give
// the same digest. A build that is killed leaves the store as it was; the next
// one clears what it left.
func (s *Store) Build(ctx context.Context, recipe string, cfg BuildConfig) (Image, error) {
	if recipe != recipeTiny {
		return Image{}, &RecipeError{recipe, ErrNoRecipe, "recipes: " + recipeTiny}
	}
	unlock, err := s.lock()
	if err != nil {
		return Image{}, fmt.Errorf("build image %s: %w", recipe, err)
	}
	defer unlock()
	b := &build{store: s, cfg: cfg, total: 5}
	img, err := b.tiny(ctx)
	if err != nil {
		var failed *RecipeError
		if errors.As(err, &failed) {
			return Image{}, err
		}
		return Image{}, &RecipeError{Recipe: recipe, Err: err}
	}
	return img, nil
}

type build struct {
	store       *Store
	cfg         BuildConfig
	done, total int
}

func (b *build) step(name string) {
	if b.cfg.Progress != nil {
		b.cfg.Progress(Progress{name, b.done, b.total})
	}
	b.done++
}

func (b *build) tiny(ctx context.Context) (Image, error) {
	b.step("find agent, kernel and busybox")
	agent, err := readStatic(b.cfg.Agent)
	if err != nil {
		return Image{}, fmt.Errorf("agent: %w", err)
	}
	src, err := b.sources(ctx)
	if err != nil {
		return Image{}, err
	}
	defer src.close()
	b.step("unpack kernel " + src.release)
	packed, err := os.ReadFile(src.kernel)
	if err != nil {
		return Image{}, fmt.Errorf("kernel: %w", err)
	}
	meta := Meta{Version: metaVersion, Recipe: recipeTiny, Arch: runtime.GOARCH, Kernel: src.release, KernelFormat: FormatImage}
	kernel := packed
	if runtime.GOARCH == "amd64" {
		meta.KernelFormat = FormatPVH
		if kernel, err = extractVmlinux(packed); err != nil {
			return Image{}, fmt.Errorf("kernel %s: %w", src.kernel, err)
		}
	}
	b.step("collect modules")
	modules, err := loadModules(src.modules, guestModules())
	if err != nil {
		return Image{}, err
	}
	b.step("pack initramfs")
	busybox, err := readStatic(src.busybox)
	if err != nil {
		return Image{}, fmt.Errorf("busybox: %w", err)
	}
	applets, err := run(ctx, "", src.busybox, "--list-full")
	if err != nil {
		return Image{}, err
	}
	initramfs, err := tinyInitramfs(agent, busybox, strings.Fields(applets), modules)
	if err != nil {
		return Image{}, err
	}
	if err := ctx.Err(); err != nil {
		return Image{}, err
	}
	b.step("store")
	name := b.cfg.Name
	if name == "" {
		name = recipeTiny
	}
	img, err := b.store.add(ctx, Reference(name), meta, kernel, initramfs)
	if err != nil {
		return Image{}, err
	}
	b.step("done")
	return img, nil
}

// readStatic reads a program and refuses one that needs a dynamic linker, which
// no guest of ours has.
func readStatic(path string) ([]byte, error) {
	if path == "" {
		return nil, errors.New("no program given")
	}
	f, err := elf.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			return nil, fmt.Errorf("%s is not statically linked", path)
		}
	}
	return os.ReadFile(path)
}

// newestKernel finds the newest kernel in bootDir whose modules are in moduleDir.
func newestKernel(bootDir, moduleDir, flavour string) (kernel, modules, release string, ok bool) {
	found, err := filepath.Glob(filepath.Join(bootDir, "vmlinuz-*-"+flavour))
	if err != nil || len(found) == 0 {
		return "", "", "", false
	}
	slices.SortFunc(found, compareVersions)
	for _, kernel := range slices.Backward(found) {
		release := strings.TrimPrefix(filepath.Base(kernel), "vmlinuz-")
		modules := filepath.Join(moduleDir, release)
		f, err := os.Open(kernel) // some distributions let only root read kernels
		if err != nil {
			continue
		}
		_ = f.Close() // opened to see whether it may be read
		if info, err := os.Stat(filepath.Join(modules, "kernel")); err == nil && info.IsDir() {
			return kernel, modules, release, true
		}
	}
	return "", "", "", false
}

// compareVersions orders texts with numbers in them as people do.
func compareVersions(a, b string) int {
	number := func(s string) (string, string) {
		i := 0
		for i < len(s) && s[i] >= '0' && s[i] <= '9' {
			i++
		}
		return strings.TrimLeft(s[:i], "0"), s[i:]
	}
	for a != "" && b != "" {
		x, restA := number(a)
		y, restB := number(b)
		if len(restA) < len(a) && len(restB) < len(b) {
			if len(x) != len(y) {
				return len(x) - len(y)
			}
			if c := strings.Compare(x, y); c != 0 {
				return c
			}
			a, b = restA, restB
			continue
		}
		if a[0] != b[0] {
			return int(a[0]) - int(b[0])
		}
		a, b = a[1:], b[1:]
	}
	return len(a) - len(b)
}
