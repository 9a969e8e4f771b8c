package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync"

	"github.com/spf13/cobra"

	"helix.local/helix/gateway/api"
)

var (
	errNoSocket = errors.New("pass descriptor: standard output is no unix socket; leave out --pass-fd")
	errCut      = errors.New("the connection was reset")
)

func (a *app) proxyCommand() *cobra.Command {
	var passFD bool
	cmd := &cobra.Command{
		Use: "proxy HOST PORT", Short: "Connect standard input and output to a port of a workspace", Hidden: true,
		Args: exactly("HOST", "PORT"),
		RunE: func(cmd *cobra.Command, args []string) error {
			port, err := strconv.ParseUint(args[1], 10, 16)
			if err != nil || port == 0 {
				return usagef("", "%q is no port", args[1])
			}
			if err := a.proxy(cmd.Context(), api.ProxyRequest{Host: args[0], Port: uint16(port)}, passFD); err != nil {
				// One line and 1: ssh shows the one and needs no more than the other.
				if hint := a.hint(err); hint != "" {
					return &exitError{exitOther, fmt.Errorf("%v (%s)", err, hint)}
				}
				return &exitError{exitOther, err}
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&passFD, "pass-fd", false, "hand the connection over through standard output (ProxyUseFDPass)")
	return cmd
}

func (a *app) proxy(ctx context.Context, req api.ProxyRequest, passFD bool) error {
	socket, err := a.socket("proxy.sock")
	if err != nil {
		return err
	}
	conn, err := api.DialProxy(ctx, socket, req)
	if err != nil {
		return err
	}
	defer conn.Close()
	stdout := a.stdout
	if s, ok := stdout.(*sink); ok {
		stdout = s.w
	}
	if passFD {
		return passConn(conn, stdout)
	}
	if err := joinStdio(ctx, conn, a.stdin, stdout); err != nil {
		return fmt.Errorf("%s port %d: %w", req.Host, req.Port, err)
	}
	return nil
}

// joinStdio copies between conn and standard input and output, passes the end
// of either way on, and returns when both have ended, or when the connection is
// gone as a whole. It closes conn, and out at the connection's end.
//
// The gateway closes a unix socket both ways where it would reset a TCP
// connection, so that an end which comes with it, before ours, is an error and
// no end of the data.
func joinStdio(ctx context.Context, conn *net.UnixConn, in io.Reader, out io.Writer) error {
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	var mu sync.Mutex
	sent := false // our end has been passed on
	ended := make(chan error, 1)
	// Nobody waits for this one when the connection goes first: a read from
	// standard input cannot be ended, and the program ends right after.
	go func() {
		_, err := io.Copy(conn, in)
		mu.Lock()
		sent = true
		mu.Unlock()
		ended <- errors.Join(err, conn.CloseWrite())
	}()
	_, err := io.Copy(out, conn)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err != nil {
		return err
	}
	mu.Lock()
	cut := !sent && hungUp(conn)
	mu.Unlock()
	if cut {
		return errCut
	}
	if err := endOutput(out); err != nil {
		return err
	}
	gone := make(chan struct{})
	go func() { // ends with conn
		defer close(gone)
		awaitHangUp(conn)
	}()
	select {
	case err = <-ended:
	case <-gone:
		mu.Lock()
		cut = !sent
		mu.Unlock()
		if err = errCut; !cut { // both ways have ended
			err = <-ended
		}
	}
	_ = conn.Close() // everything has been said
	<-gone
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}
