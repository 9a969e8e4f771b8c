package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"syscall"
)

func execSignals() []os.Signal { return []os.Signal{syscall.SIGINT, syscall.SIGTERM} }

func isResize(os.Signal) bool { return false }

// become runs the program at path and ends as it does: Windows has no exec.
func (a *app) become(path string, argv []string) error {
	cmd := exec.Command(path, argv[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	err := cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return &exitError{code: exit.ExitCode()}
	}
	if err != nil {
		return fmt.Errorf("run %s: %w", path, err)
	}
	return nil
}

func passConn(*net.UnixConn, any) error {
	return errors.New("pass descriptor: Windows has no such thing; leave out --pass-fd")
}

func hungUp(*net.UnixConn) bool { return false }

// awaitHangUp returns when conn is closed, by a read: nothing comes any more.
func awaitHangUp(conn *net.UnixConn) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return // it is closed
	}
	_ = raw.Read(func(uintptr) bool { return false }) // it ends when conn is closed
}

func endOutput(out any) error {
	file, ok := out.(*os.File)
	if !ok {
		return nil
	}
	if err := file.Close(); err != nil {
		return fmt.Errorf("end standard output: %w", err)
	}
	return nil
}
