package vmctl

import (
	"fmt"
	"os"
)

func lockRun(string) (*os.File, error) {
	return nil, fmt.Errorf("lock run folder: %w", ErrUnsupported)
}

func held(string) error { return fmt.Errorf("lock run folder: %w", ErrUnsupported) }

func privateFiles() {}
