//go:build !unix

package gateway

import (
	"errors"
	"net"
	"os"
	"syscall"
)

// errPlatform reports what a gateway needs and this system is not yet made to give.
var errPlatform = errors.New("the gateway does not run on this system yet")

func socketPair() (net.Conn, *os.File, error)    { return nil, nil, errPlatform }
func ownGroup() *syscall.SysProcAttr             { return nil }
func readable(string) error                      { return nil }
func tryLock(*os.File) error                     { return errPlatform }
func listenPrivate(string) (net.Listener, error) { return nil, errPlatform }
func ownerOf(os.FileInfo) (uid int, ok bool)     { return 0, false }
