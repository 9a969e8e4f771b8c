package guest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"
)

// ModuleList names the kernel modules to load: one absolute path a line, each
// after those it depends on. Lines that begin with # are notes.
const ModuleList = "/lib/helix/modules"

func parseModules(text string) ([]string, error) {
	var list []string
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		if !path.IsAbs(line) {
			return nil, fmt.Errorf("read module list: %q is not an absolute path", line)
		}
		list = append(list, line)
	}
	return list, nil
}

// LoadModules loads what the list file names and calls loaded after each. A
// guest without a list has its drivers built in. A module that fails does not
// stop those after it.
func LoadModules(list string, loaded func(path string)) error {
	text, err := os.ReadFile(list)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read module list: %w", err)
	}
	paths, err := parseModules(string(text))
	if err != nil {
		return err
	}
	var failed []error
	for _, p := range paths {
		if err := loadModule(p); err != nil {
			failed = append(failed, err)
			continue
		}
		loaded(p)
	}
	return errors.Join(failed...)
}

// loadModule loads one module. That it is there already, or has no device to
// drive, is fine.
func loadModule(p string) error {
	f, err := os.Open(p)
	if err != nil {
		return fmt.Errorf("load module: %w", err)
	}
	defer func() { _ = f.Close() }() // read only
	err = unix.FinitModule(int(f.Fd()), "", 0)
	if err != nil && !errors.Is(err, unix.EEXIST) && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("load module %s: %w", path.Base(p), err)
	}
	return nil
}
