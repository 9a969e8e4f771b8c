// Package front owns the gateway's listening sockets: it binds them (or says
// who is in the way), accepts, and hands each connection to one function. On
// TLS ports it looks at the server name first, so that a service which
// terminates its own TLS gets its bytes untouched.
package front

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"syscall"
)

// Result says where a listener came to be.
type Result struct {
	Wanted netip.AddrPort
	Got    netip.AddrPort // Wanted, unless Why says otherwise
	Why    error          // why not Wanted; nil when it is
	Holder string         // who has Wanted, such as "sshd (pid 812) on 0.0.0.0:22"; "" = not known
}

// Fallback reports whether the port is not the wanted one.
func (r Result) Fallback() bool { return r.Why != nil }

// String is the outcome in one line.
func (r Result) String() string {
	switch {
	case r.Why == nil:
		return "listening on " + r.Got.String()
	case r.Holder != "":
		return fmt.Sprintf("listening on %s: %s is taken by %s", r.Got, r.Wanted, r.Holder)
	default:
		return fmt.Sprintf("listening on %s: %s: %v", r.Got, r.Wanted, r.Why)
	}
}

// BindError reports that neither the wanted port nor the fallback could be
// bound. errors.Is finds the system's reason.
type BindError struct {
	Network string // "tcp" or "udp"
	Wanted  netip.AddrPort
	Holder  string
	Err     error
}

// Error names the address and who holds it.
func (e *BindError) Error() string {
	if e.Holder != "" {
		return fmt.Sprintf("listen on %s %s: taken by %s", e.Network, e.Wanted, e.Holder)
	}
	return fmt.Sprintf("listen on %s %s: %v", e.Network, e.Wanted, e.Err)
}

// Unwrap is the system's error.
func (e *BindError) Unwrap() error { return e.Err }

// Hint is what a person can do.
func (e *BindError) Hint() string {
	switch {
	case errors.Is(e.Err, syscall.EADDRINUSE):
		return "stop the other program, or let it listen on one address instead of all"
	case errors.Is(e.Err, syscall.EACCES):
		return "run as root, or lower net.ipv4.ip_unprivileged_port_start"
	case errors.Is(e.Err, syscall.EADDRNOTAVAIL):
		return "add the address to the loopback interface first"
	}
	return ""
}

// Bind listens for TCP on addr. When that may not be (no privilege) or cannot
// be (somebody else does) and fallback is not 0, it listens on that port of
// the same address and says so in the Result. Other failures, and that of the
// fallback, are a *BindError.
func Bind(ctx context.Context, addr netip.AddrPort, fallback uint16) (*net.TCPListener, Result, error) {
	lc := net.ListenConfig{KeepAliveConfig: keepAlive}
	var ln *net.TCPListener
	res, err := bind(addr, fallback, "tcp", func(a netip.AddrPort) (net.Addr, error) {
		l, err := lc.Listen(ctx, "tcp", a.String())
		if err != nil {
			return nil, err
		}
		ln = l.(*net.TCPListener)
		return ln.Addr(), nil
	})
	return ln, res, err
}

// BindPacket is Bind for UDP.
func BindPacket(ctx context.Context, addr netip.AddrPort, fallback uint16) (*net.UDPConn, Result, error) {
	var lc net.ListenConfig
	var conn *net.UDPConn
	res, err := bind(addr, fallback, "udp", func(a netip.AddrPort) (net.Addr, error) {
		c, err := lc.ListenPacket(ctx, "udp", a.String())
		if err != nil {
			return nil, err
		}
		conn = c.(*net.UDPConn)
		return conn.LocalAddr(), nil
	})
	return conn, res, err
}

func bind(addr netip.AddrPort, fallback uint16, network string, listen func(netip.AddrPort) (net.Addr, error)) (Result, error) {
	got, why := listen(addr)
	if why == nil {
		return Result{Wanted: addr, Got: addrPort(got)}, nil
	}
	var holder string
	if errors.Is(why, syscall.EADDRINUSE) {
		holder = Holder(network, addr)
	}
	failed := &BindError{Network: network, Wanted: addr, Holder: holder, Err: bare(why)}
	if fallback == 0 || !errors.Is(why, syscall.EADDRINUSE) && !errors.Is(why, syscall.EACCES) {
		return Result{Wanted: addr}, failed
	}
	second := netip.AddrPortFrom(addr.Addr(), fallback)
	got, err := listen(second)
	if err != nil {
		failed.Err = errors.Join(failed.Err, fmt.Errorf("and on port %d: %w", fallback, bare(err)))
		if errors.Is(err, syscall.EADDRINUSE) {
			if h := Holder(network, second); h != "" {
				failed.Holder = joinHolders(holder, addr, h, second)
			}
		}
		return Result{Wanted: addr}, failed
	}
	return Result{Wanted: addr, Got: addrPort(got), Why: bare(why), Holder: holder}, nil
}

func joinHolders(first string, addr netip.AddrPort, second string, fallback netip.AddrPort) string {
	if first == "" {
		return fmt.Sprintf("%s (and no privilege for port %d)", second, addr.Port())
	}
	return fmt.Sprintf("%s, and %s by %s", first, fallback, second)
}

// bare takes the address off a listen error: Result and BindError name it.
func bare(err error) error {
	if op, ok := errors.AsType[*net.OpError](err); ok {
		return op.Err
	}
	return err
}

func addrPort(a net.Addr) netip.AddrPort {
	switch a := a.(type) {
	case *net.TCPAddr:
		return unmap(a.AddrPort())
	case *net.UDPAddr:
		return unmap(a.AddrPort())
	}
	return netip.AddrPort{}
}

func unmap(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}

// socket is one listening socket as the system lists it.
type socket struct {
	local netip.AddrPort
	inode string
}

// describe puts a holder into words.
func describe(name string, pid int, s socket) string {
	if pid == 0 {
		return "a process of another user on " + s.local.String()
	}
	if name == "" {
		name = "a process"
	}
	return name + " (pid " + strconv.Itoa(pid) + ") on " + s.local.String()
}
