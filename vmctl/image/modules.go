package image

import (
	"bytes"
	"compress/gzip"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/klauspost/compress/zstd"
)

// guestModules is what a guest needs from its first moment, in the order in
// which it is wanted: the control link first, then what it is told, disk,
// network, and last what only machines with PCI or a power button need.
func guestModules() []string {
	return []string{
		"qemu_fw_cfg", "virtio_mmio", "virtio_console", "virtio_blk", "virtio_net", "virtio_rng",
		"ext4", "virtio_pci", "button", "evdev",
	}
}

// module is one kernel module, unpacked.
type module struct {
	name string // as lsmod shows it
	body []byte
}

// loadModules reads the wanted modules below dir and all they depend on, each
// after its dependencies. A module that is not there is built in. Dependencies
// come from the modules themselves: modules.dep is made when a kernel is
// installed, and a package that was only unpacked has none.
func loadModules(dir string, wanted []string) ([]module, error) {
	files, err := moduleFiles(dir)
	if err != nil {
		return nil, err
	}
	var list []module
	seen := map[string]bool{}
	var visit func(name string) error
	visit = func(name string) error {
		path, ok := files[name]
		if !ok || seen[name] {
			return nil
		}
		seen[name] = true
		body, err := readModule(path)
		if err != nil {
			return fmt.Errorf("read module %s: %w", name, err)
		}
		body = unsigned(body)
		depends, err := dependsOf(body)
		if err != nil {
			return fmt.Errorf("read module %s: %w", name, err)
		}
		for _, d := range depends {
			if err := visit(d); err != nil {
				return err
			}
		}
		list = append(list, module{name, body})
		return nil
	}
	for _, name := range wanted {
		if err := visit(name); err != nil {
			return nil, err
		}
	}
	return list, nil
}

// moduleFiles maps module names to files. Names use "_" where files may have "-".
func moduleFiles(dir string) (map[string]string, error) {
	files := map[string]string{}
	err := filepath.WalkDir(filepath.Join(dir, "kernel"), func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if base, _, ok := strings.Cut(d.Name(), ".ko"); ok && !d.IsDir() {
			files[strings.ReplaceAll(base, "-", "_")] = path
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list modules: %w", err)
	}
	return files, nil
}

func readModule(path string) ([]byte, error) {
	body, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	switch filepath.Ext(path) {
	case ".ko":
		return body, nil
	case ".gz":
		r, err := gzip.NewReader(bytes.NewReader(body))
		if err != nil {
			return nil, err
		}
		return io.ReadAll(r)
	case ".zst":
		r, err := zstd.NewReader(bytes.NewReader(body))
		if err != nil {
			return nil, err
		}
		defer r.Close()
		return io.ReadAll(r)
	}
	return nil, fmt.Errorf("%w (%s)", errCompression, filepath.Base(path))
}

// signatureMark ends a signed module (scripts/sign-file of the kernel). Before it
// stand the signature and a header of 12 bytes, of which the last four are the
// signature's length, big-endian.
const (
	signatureMark   = "~Module signature appended~\n"
	signatureHeader = 12
)

// unsigned takes the signature off a module. The package was verified when it
// was fetched, and the image is verified by digest at each start; a guest that
// checks each module's RSA signature again, emulated, only boots later.
func unsigned(body []byte) []byte {
	rest, ok := bytes.CutSuffix(body, []byte(signatureMark))
	if !ok || len(rest) < signatureHeader {
		return body
	}
	length := uint64(binary.BigEndian.Uint32(rest[len(rest)-4:])) + signatureHeader
	if length > uint64(len(rest)) {
		return body // not what it seems; the kernel will say so
	}
	return rest[:uint64(len(rest))-length]
}

// dependsOf reads the names a module depends on from its .modinfo section, which
// holds key=value strings that each end with a zero byte.
func dependsOf(body []byte) ([]string, error) {
	f, err := elf.NewFile(bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	section := f.Section(".modinfo")
	if section == nil {
		return nil, fmt.Errorf("no .modinfo section")
	}
	info, err := section.Data()
	if err != nil {
		return nil, err
	}
	var names []string
	for entry := range bytes.SplitSeq(info, []byte{0}) {
		value, ok := strings.CutPrefix(string(entry), "depends=")
		if !ok {
			continue
		}
		for name := range strings.SplitSeq(value, ",") {
			if name != "" {
				names = append(names, strings.ReplaceAll(name, "-", "_"))
			}
		}
	}
	return names, nil
}
