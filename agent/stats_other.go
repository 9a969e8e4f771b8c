//go:build !linux

package agent

import (
	"errors"
	"fmt"

	"helix.local/helix/agent/wire"
)

func readStats(string) (wire.Stats, error) {
	return wire.Stats{}, fmt.Errorf("read stats: %w", errors.ErrUnsupported)
}
