package session

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
)

const terminals = false

func (s *Server) shell(a Account, _ *string) (*exec.Cmd, string, error) {
	return nil, "", fmt.Errorf("start shell of account %q on Windows: %w", a.Name, errors.ErrUnsupported)
}

func (s *Server) folder(a Account) (dir, note string, err error) { return a.Home, "", nil }

func attributes(Account) *syscall.SysProcAttr { return &syscall.SysProcAttr{} }

func (s *Server) startTTY(*exec.Cmd, Account, terminal) (*program, error) {
	return nil, fmt.Errorf("open a terminal on Windows: %w", errors.ErrUnsupported)
}

func setSize(*os.File, windowPayload) error {
	return fmt.Errorf("set terminal size on Windows: %w", errors.ErrUnsupported)
}

func coreDumped(syscall.WaitStatus) bool { return false }
