package ports

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strconv"
)

// stateListen is TCP_LISTEN in the kernel's include/net/tcp_states.h.
const stateListen = "0A"

var errTable = errors.New("malformed line")

// parseTable reads the listeners of /proc/net/tcp or tcp6. The kernel prints
// listeners before all other sockets, so it stops at the first that is none:
// with thousands of connections the rest would cost.
func parseTable(r io.Reader) ([]Listener, error) {
	lines := bufio.NewScanner(r)
	var found []Listener
	for first := true; lines.Scan(); first = false {
		if first { // the headings
			continue
		}
		l, listening, err := parseLine(lines.Bytes())
		if err != nil {
			return nil, err
		}
		if !listening {
			return found, nil
		}
		found = append(found, l)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read socket table: %w", err)
	}
	return found, nil
}

// parseLine reads one line: "sl: local remote state tx:rx tr:tm retrnsmt uid timeout inode ...".
func parseLine(line []byte) (l Listener, listening bool, err error) {
	fields := bytes.Fields(line)
	if len(fields) < 10 {
		return l, false, fmt.Errorf("parse socket table: %w: %q", errTable, line)
	}
	if string(fields[3]) != stateListen {
		return l, false, nil
	}
	if l.Addr, err = parseAddress(fields[1]); err != nil {
		return l, false, err
	}
	if l.Inode, err = strconv.ParseUint(string(fields[9]), 10, 64); err != nil {
		return l, false, fmt.Errorf("parse socket table: %w: inode %q", errTable, fields[9])
	}
	return l, true, nil
}

// parseAddress reads an address as the kernel prints it: each 32-bit word in
// the machine's byte order, which is little-endian wherever we run.
func parseAddress(field []byte) (netip.AddrPort, error) {
	bad := fmt.Errorf("parse socket table: %w: address %q", errTable, field)
	host, port, ok := bytes.Cut(field, []byte{':'})
	if !ok || len(port) != 4 || len(host) != 8 && len(host) != 32 {
		return netip.AddrPort{}, bad
	}
	number, err := strconv.ParseUint(string(port), 16, 16)
	if err != nil {
		return netip.AddrPort{}, bad
	}
	raw := make([]byte, len(host)/2)
	if _, err := hex.Decode(raw, host); err != nil {
		return netip.AddrPort{}, bad
	}
	for word := range slices.Chunk(raw, 4) {
		slices.Reverse(word)
	}
	addr, _ := netip.AddrFromSlice(raw) // 4 or 16 bytes by the check above
	return netip.AddrPortFrom(addr.Unmap(), uint16(number)), nil
}
