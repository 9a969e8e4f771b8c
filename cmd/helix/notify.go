package main

import (
	"fmt"
	"net"
	"strings"
)

// notify tells the service manager behind socket (sd_notify(3)) our state. ""
// means that none wants to know.
func notify(socket, state string) error {
	if socket == "" {
		return nil
	}
	if name, abstract := strings.CutPrefix(socket, "@"); abstract {
		socket = "\x00" + name
	}
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		return fmt.Errorf("notify: %w", err)
	}
	defer conn.Close()
	if _, err := conn.Write([]byte(state)); err != nil {
		return fmt.Errorf("notify: %w", err)
	}
	return nil
}
