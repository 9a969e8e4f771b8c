package front

import (
	"net/netip"
	"testing"
)

const procTCP = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1234 1 0000000000000000 100 0 0 10 0
   1: 0500587F:01BB 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 5678 1 0000000000000000 100 0 0 10 0
   2: 0100007F:0016 0100007F:9999 01 00000000:00000000 00:00000000 00000000     0        0 9999 1 0000000000000000 100 0 0 10 0
   3: garbage
`

const procTCP6 = `  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000000000000000000000000000:0050 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 42 1 0000000000000000 100 0 0 10 0
   1: 0000000000000000FFFF00000100007F:0051 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 43 1 0000000000000000 100 0 0 10 0
`

func TestListeningSockets(t *testing.T) {
	for want, table := range map[string]string{
		"0.0.0.0:22/1234 127.88.0.5:443/5678 ": procTCP,
		"[::]:80/42 127.0.0.1:81/43 ":          procTCP6,
		"":                                     "",
	} {
		var got string
		for _, s := range listening(table, "tcp") {
			got += s.local.String() + "/" + s.inode + " "
		}
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	if len(listening(procTCP, "udp")) != 0 {
		t.Error("TCP states are not those of UDP")
	}
}

func TestBlocks(t *testing.T) {
	for _, c := range []struct {
		have, want string
		blocks     bool
	}{
		{"0.0.0.0:22", "127.88.0.5:22", true},
		{"127.88.0.5:22", "127.88.0.5:22", true},
		{"127.0.0.1:22", "127.88.0.5:22", false},
		{"0.0.0.0:23", "127.88.0.5:22", false},
		{"[::]:22", "127.88.0.5:22", true}, // IPv4 is included, as a rule
		{"0.0.0.0:22", "[::1]:22", false},
		{"[::1]:22", "[::1]:22", true},
		{"127.0.0.1:22", "0.0.0.0:22", true},
	} {
		if got := blocks(netip.MustParseAddrPort(c.have), netip.MustParseAddrPort(c.want)); got != c.blocks {
			t.Errorf("%s and %s: got %v", c.have, c.want, got)
		}
	}
}

func TestOwnerOfNobodysSocket(t *testing.T) {
	if name, pid := owner("0"); name != "" || pid != 0 {
		t.Errorf("got %q %d", name, pid)
	}
}

func FuzzKernelAddr(f *testing.F) {
	for _, s := range []string{"0100007F:0016", "00000000000000000000000000000000:0050", "0:0", ":", "0100007F:FFFFF"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if a, ok := kernelAddr(s); ok != a.IsValid() {
			t.Fatalf("%q: %v, %v", s, a, ok)
		}
	})
}
