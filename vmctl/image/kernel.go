package image

import (
	"bytes"
	"compress/gzip"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
)

// maxKernel bounds an uncompressed kernel, so that a damaged one cannot fill the
// memory.
const maxKernel = 512 << 20

// errCompression reports a kernel whose payload is packed in a way we cannot undo.
var errCompression = errors.New("unknown kernel compression")

// extractVmlinux takes the ELF kernel out of a bzImage and checks that QEMU can
// enter it directly. Offsets are those of Documentation/arch/x86/boot.rst of
// Linux: setup_sects at 0x1f1, "HdrS" at 0x202, payload_offset at 0x248,
// payload_length at 0x24c.
func extractVmlinux(image []byte) ([]byte, error) {
	if len(image) < 0x250 || string(image[0x202:0x206]) != "HdrS" {
		return nil, errors.New("not a bzImage")
	}
	sectors := int(image[0x1f1])
	if sectors == 0 {
		sectors = 4
	}
	start := (sectors+1)*512 + int(binary.LittleEndian.Uint32(image[0x248:]))
	size := int(binary.LittleEndian.Uint32(image[0x24c:]))
	if size < 8 || start > len(image) || size > len(image)-start {
		return nil, errors.New("bzImage payload lies outside of the file")
	}
	payload := image[start : start+size]
	// The last four bytes are the length of the unpacked kernel, except for gzip,
	// whose own trailer ends with the same number.
	want := binary.LittleEndian.Uint32(payload[size-4:])
	if want > maxKernel {
		return nil, fmt.Errorf("kernel of %d bytes is too large", want)
	}
	kernel, err := unpack(payload, int(want))
	if err != nil {
		return nil, fmt.Errorf("unpack kernel: %w", err)
	}
	if err := checkPVH(kernel); err != nil {
		return nil, err
	}
	return kernel, nil
}

func unpack(payload []byte, want int) ([]byte, error) {
	body := payload[:len(payload)-4]
	switch {
	case bytes.HasPrefix(payload, []byte("\x7fELF")):
		return payload, nil
	case bytes.HasPrefix(payload, []byte{0x1f, 0x8b}):
		r, err := gzip.NewReader(bytes.NewReader(payload))
		if err != nil {
			return nil, err
		}
		r.Multistream(false)
		return readExactly(r, want)
	case bytes.HasPrefix(payload, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		r, err := zstd.NewReader(bytes.NewReader(body), zstd.WithDecoderMaxMemory(maxKernel))
		if err != nil {
			return nil, err
		}
		defer r.Close()
		return readExactly(r, want)
	case bytes.HasPrefix(payload, []byte{0x02, 0x21, 0x4c, 0x18}):
		return unpackLZ4(body[4:], want)
	}
	return nil, fmt.Errorf("%w (first bytes % x)", errCompression, payload[:4])
}

func readExactly(r io.Reader, want int) ([]byte, error) {
	kernel := make([]byte, want)
	if _, err := io.ReadFull(r, kernel); err != nil {
		return nil, err
	}
	return kernel, nil
}

// unpackLZ4 reads the legacy frame: blocks of up to 8 MiB, each after its packed
// length.
func unpackLZ4(packed []byte, want int) ([]byte, error) {
	const block = 8 << 20
	kernel := make([]byte, want)
	done := 0
	for len(packed) >= 4 && done < want {
		n := int(binary.LittleEndian.Uint32(packed))
		packed = packed[4:]
		if n > len(packed) {
			return nil, io.ErrUnexpectedEOF
		}
		m, err := lz4.UncompressBlock(packed[:n], kernel[done:min(done+block, want)])
		if err != nil {
			return nil, err
		}
		done += m
		packed = packed[n:]
	}
	if done != want {
		return nil, io.ErrUnexpectedEOF
	}
	return kernel, nil
}

// checkPVH looks for the note that tells QEMU where a kernel can be entered in
// 32-bit mode without firmware (XEN_ELFNOTE_PHYS32_ENTRY).
func checkPVH(kernel []byte) error {
	const physEntry = 18
	f, err := elf.NewFile(bytes.NewReader(kernel))
	if err != nil {
		return fmt.Errorf("read kernel: %w", err)
	}
	for _, p := range f.Progs {
		if p.Type != elf.PT_NOTE || p.Filesz > 1<<20 {
			continue
		}
		notes, err := io.ReadAll(p.Open())
		if err != nil {
			return fmt.Errorf("read kernel notes: %w", err)
		}
		for len(notes) >= 12 {
			name := int64(f.ByteOrder.Uint32(notes))
			size := int64(f.ByteOrder.Uint32(notes[4:]))
			kind := f.ByteOrder.Uint32(notes[8:])
			next := 12 + (name+3)&^3 + (size+3)&^3
			if next > int64(len(notes)) {
				break
			}
			if kind == physEntry && string(notes[12:12+name]) == "Xen\x00" {
				return nil
			}
			notes = notes[next:]
		}
	}
	return errors.New("kernel has no PVH entry point (CONFIG_PVH)")
}
