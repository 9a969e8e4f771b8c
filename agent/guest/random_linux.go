package guest

import (
	"crypto/sha512"
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// entropy is struct rand_pool_info of include/uapi/linux/random.h.
type entropy struct {
	bits, size int32
	data       [sha512.Size]byte
}

// SeedRandom gives the kernel's random generator what the host knows to be
// random, so that it need not gather first. The secret counts as 256 bits and
// goes through a hash under a name of its own: the generator's state says
// nothing about it, and the kernel's own noise is mixed in as always.
func SeedRandom(device string, secret []byte) error {
	f, err := os.OpenFile(device, os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("seed the random generator: %w", err)
	}
	e := entropy{bits: 256, size: sha512.Size, data: sha512.Sum512(append([]byte("helix guest entropy\x00"), secret...))}
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), unix.RNDADDENTROPY, uintptr(unsafe.Pointer(&e)))
	err = f.Close()
	if errno != 0 {
		err = errors.Join(errno, err)
	}
	if err != nil {
		return fmt.Errorf("seed the random generator: %w", err)
	}
	return nil
}
