package front

import (
	"encoding/binary"
	"encoding/hex"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Holder names who keeps addr from being bound, "" when nobody is found. It
// reads /proc; processes of other users are found but cannot be named without
// privileges.
func Holder(network string, addr netip.AddrPort) string {
	for _, file := range []string{network, network + "6"} {
		table, err := os.ReadFile(filepath.Join("/proc/net", file))
		if err != nil {
			continue // no IPv6, or no /proc: a message without a name is still one
		}
		for _, s := range listening(string(table), network) {
			if blocks(s.local, addr) {
				name, pid := owner(s.inode)
				return describe(name, pid, s)
			}
		}
	}
	return ""
}

// blocks reports whether a socket on have keeps want from being bound.
func blocks(have, want netip.AddrPort) bool {
	if have.Port() != want.Port() {
		return false
	}
	h, w := have.Addr(), want.Addr()
	if h.IsUnspecified() || w.IsUnspecified() {
		return h.Is4() == w.Is4() || h.Is6() && h.IsUnspecified() || w.Is6() && w.IsUnspecified()
	}
	return h == w
}

// listening reads a table of /proc/net: the TCP sockets that listen, or the
// UDP sockets without a peer (proc_pid_net(5)). Lines it cannot read are left out.
func listening(table, network string) []socket {
	state := "0A"
	if network == "udp" {
		state = "07"
	}
	var out []socket
	for line := range strings.Lines(table) {
		fields := strings.Fields(line)
		if len(fields) < 10 || fields[3] != state {
			continue
		}
		if local, ok := kernelAddr(fields[1]); ok {
			out = append(out, socket{local, fields[9]})
		}
	}
	return out
}

// kernelAddr reads "0100007F:0016". The address is in 32-bit groups of the
// machine's own byte order.
func kernelAddr(s string) (netip.AddrPort, bool) {
	host, port, ok := strings.Cut(s, ":")
	raw, err := hex.DecodeString(host)
	if !ok || err != nil {
		return netip.AddrPort{}, false
	}
	p, err := strconv.ParseUint(port, 16, 16)
	if err != nil || len(raw)%4 != 0 {
		return netip.AddrPort{}, false
	}
	for i := 0; i < len(raw); i += 4 {
		binary.BigEndian.PutUint32(raw[i:], binary.NativeEndian.Uint32(raw[i:]))
	}
	addr, ok := netip.AddrFromSlice(raw)
	if !ok {
		return netip.AddrPort{}, false
	}
	return netip.AddrPortFrom(addr.Unmap(), uint16(p)), true
}

// owner finds the process that has the socket open.
func owner(inode string) (name string, pid int) {
	want := "socket:[" + inode + "]"
	fds, err := filepath.Glob("/proc/[0-9]*/fd")
	if err != nil {
		return "", 0
	}
	for _, dir := range fds {
		entries, err := os.ReadDir(dir)
		if err != nil {
			continue // another user's, or gone by now
		}
		if !slices.ContainsFunc(entries, func(e os.DirEntry) bool {
			target, err := os.Readlink(filepath.Join(dir, e.Name()))
			return err == nil && target == want
		}) {
			continue
		}
		process := filepath.Dir(dir)
		pid, err := strconv.Atoi(filepath.Base(process))
		if err != nil {
			continue
		}
		comm, err := os.ReadFile(filepath.Join(process, "comm"))
		if err != nil {
			return "", pid
		}
		return strings.TrimSpace(string(comm)), pid
	}
	return "", 0
}
