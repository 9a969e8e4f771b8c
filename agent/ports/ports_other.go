//go:build !linux

package ports

import (
	"errors"
	"fmt"
)

func listeners() ([]Listener, error) {
	return nil, fmt.Errorf("read socket table: %w", errors.ErrUnsupported)
}

func owners(func() ([]int, error), map[uint64]bool) (map[uint64]owner, error) {
	return nil, fmt.Errorf("find owners of sockets: %w", errors.ErrUnsupported)
}
