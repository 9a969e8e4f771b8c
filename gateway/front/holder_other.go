//go:build !linux

package front

import "net/netip"

// Holder names who keeps addr from being bound. Only Linux lets it be found
// out without help of another program; elsewhere it is "".
func Holder(string, netip.AddrPort) string { return "" }
