package ports

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"helix.local/helix/agent/wire"
)

// TestMain also is a program that listens on its arguments until its input ends.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "listen" {
		for _, address := range os.Args[2:] {
			ln, err := net.Listen("tcp", address)
			if err != nil {
				fmt.Println(err) //nolint:forbidigo // the test reads it
				os.Exit(1)
			}
			fmt.Println(ln.Addr().(*net.TCPAddr).Port) //nolint:forbidigo // as above
		}
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

const table = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 12345 1 0000000000000000 100 0 0 10 0
   1: 00000000:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 777 1 0000000000000000 100 0 0 10 0
   2: 0100007F:1F90 0100007F:9999 01 00000000:00000000 00:00000000 00000000  1000        0 778 1 0000000000000000 100 0 0 10 0
   3: 0100007F:0017 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 999 1 0000000000000000 100 0 0 10 0
`

const table6 = `  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000000000000000000001000000:0050 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 5 1 0000000000000000 100 0 0 10 0
   1: 00000000000000000000000000000000:0051 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 6 1 0000000000000000 100 0 0 10 0
   2: 0000000000000000FFFF00000100007F:0052 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 7 1 0000000000000000 100 0 0 10 0
`

func TestParseTable(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		text string
		want []Listener
		bad  bool
	}{
		"v4, stops at the first connection": {text: table, want: []Listener{
			{netip.MustParseAddrPort("127.0.0.1:22"), 12345}, {netip.MustParseAddrPort("0.0.0.0:8080"), 777},
		}},
		"v6": {text: table6, want: []Listener{
			{netip.MustParseAddrPort("[::1]:80"), 5}, {netip.MustParseAddrPort("[::]:81"), 6}, {netip.MustParseAddrPort("127.0.0.1:82"), 7},
		}},
		"empty":       {},
		"headings":    {text: "sl\n"},
		"short line":  {text: "sl\n 0: x\n", bad: true},
		"bad address": {text: "sl\n0: 0100:0016 0 0A 0 0 0 0 0 1\n", bad: true},
		"bad port":    {text: "sl\n0: 0100007F:00zz 0 0A 0 0 0 0 0 1\n", bad: true},
		"bad host":    {text: "sl\n0: 0100007X:0016 0 0A 0 0 0 0 0 1\n", bad: true},
		"bad inode":   {text: "sl\n0: 0100007F:0016 0 0A 0 0 0 0 0 x\n", bad: true},
		"long line":   {text: "sl\n" + strings.Repeat("x", 70_000), bad: true},
	} {
		got, err := parseTable(strings.NewReader(c.text))
		if !reflect.DeepEqual(got, c.want) || (err != nil) != c.bad {
			t.Errorf("%s: got %v, %v; want %v", name, got, err, c.want)
		}
	}
}

func FuzzTable(f *testing.F) {
	f.Add([]byte(table))
	f.Add([]byte(table6))
	f.Fuzz(func(t *testing.T, b []byte) {
		found, err := parseTable(bytes.NewReader(b))
		if err != nil {
			return
		}
		var text strings.Builder
		text.WriteString("sl\n")
		for _, l := range found {
			fmt.Fprintf(&text, "0: %s 0:0 0A 0 0 0 0 0 %d\n", kernelForm(l.Addr), l.Inode)
		}
		again, err := parseTable(strings.NewReader(text.String()))
		if err != nil || !slices.Equal(again, found) {
			t.Errorf("round trip: %v, %v; want %v", again, err, found)
		}
	})
}

func kernelForm(at netip.AddrPort) string {
	raw := at.Addr().AsSlice()
	for word := range slices.Chunk(raw, 4) {
		slices.Reverse(word)
	}
	return fmt.Sprintf("%X:%04X", raw, at.Port())
}

func TestTargets(t *testing.T) {
	t.Parallel()
	at := func(text string) Listener { return Listener{Addr: netip.MustParseAddrPort(text)} }
	for name, c := range map[string]struct {
		listeners []Listener
		prefer    string
		want      string
	}{
		"nothing":           {},
		"another port":      {listeners: []Listener{at("127.0.0.1:81")}},
		"loopback":          {listeners: []Listener{at("127.0.0.1:80")}, want: "127.0.0.1:80"},
		"v6 loopback":       {listeners: []Listener{at("[::1]:80")}, want: "[::1]:80"},
		"wildcard":          {listeners: []Listener{at("0.0.0.0:80")}, want: "127.0.0.1:80"},
		"v6 wildcard":       {listeners: []Listener{at("[::]:80")}, want: "[::1]:80"},
		"specific":          {listeners: []Listener{at("10.188.0.2:80")}, want: "10.188.0.2:80"},
		"loopback first":    {listeners: []Listener{at("10.188.0.2:80"), at("[::]:80"), at("127.0.0.1:80")}, want: "127.0.0.1:80 [::1]:80 10.188.0.2:80"},
		"preferred":         {listeners: []Listener{at("127.0.0.1:80"), at("127.88.0.9:80")}, prefer: "127.88.0.9", want: "127.88.0.9:80 127.0.0.1:80"},
		"each address once": {listeners: []Listener{at("0.0.0.0:80"), at("127.0.0.1:80")}, want: "127.0.0.1:80"},
	} {
		prefer, _ := netip.ParseAddr(c.prefer) // "" is no preference
		var got []string
		for _, a := range targets(c.listeners, 80, prefer) {
			got = append(got, a.String())
		}
		if text := strings.Join(got, " "); text != c.want {
			t.Errorf("%s: got %q, want %q", name, text, c.want)
		}
	}
}

// program starts a child that listens and returns its ports.
func program(t *testing.T, addresses ...string) (pid int, ports []uint16, stop func()) {
	t.Helper()
	cmd := exec.Command(os.Args[0], append([]string{"listen"}, addresses...)...)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for range addresses {
		var port uint16
		if _, err := fmt.Fscanln(stdout, &port); err != nil {
			t.Fatal(err)
		}
		ports = append(ports, port)
	}
	stopped := false
	stop = func() {
		if !stopped {
			stopped = true
			_ = stdin.Close() // tells it to end
			_ = cmd.Wait()
		}
	}
	t.Cleanup(stop)
	return cmd.Process.Pid, ports, stop
}

// The kinds of addresses, each reached where it is bound, and gone when closed.
func TestDial(t *testing.T) {
	t.Parallel()
	pid, ports, stop := program(t, "127.0.0.1:0", "0.0.0.0:0", "[::1]:0", "[::]:0", "127.9.8.7:0")
	w := New(Config{})
	for _, port := range ports {
		c, err := w.Dial(t.Context(), port)
		if err != nil {
			t.Errorf("port %d: %v", port, err)
			continue
		}
		_ = c.Close() // nothing was exchanged
	}
	list, err := w.List()
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(list, func(p wire.Port) bool { return p.Port == ports[4] })
	if i < 0 || list[i].Address != "127.9.8.7" || list[i].PID != pid || list[i].Process != "ports.test" {
		t.Errorf("list: %+v", list)
	}
	stop()
	for _, port := range ports {
		if _, err := w.Dial(t.Context(), port); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("closed port %d: %v", port, err)
		}
	}
}

// Two folders use one port number; each reaches its own program only.
func TestOwners(t *testing.T) {
	t.Parallel()
	a, ports, _ := program(t, "127.0.0.1:0")
	b, _, _ := program(t, fmt.Sprintf("127.7.7.7:%d", ports[0]))
	for pid, want := range map[int]string{a: "127.0.0.1", b: "127.7.7.7"} {
		w := New(Config{Processes: func() ([]int, error) { return []int{pid}, nil }, Prefer: netip.MustParseAddr("127.7.7.7")})
		c, err := w.Dial(t.Context(), ports[0])
		if err != nil {
			t.Fatal(err)
		}
		if got := c.RemoteAddr().(*net.TCPAddr).IP.String(); got != want {
			t.Errorf("process %d: dialled %s, want %s", pid, got, want)
		}
		_ = c.Close() // nothing was exchanged
		if list, err := w.List(); err != nil || len(list) != 1 {
			t.Errorf("process %d: %v, %v", pid, list, err)
		}
	}
	none := New(Config{Processes: func() ([]int, error) { return nil, nil }})
	if _, err := none.Dial(t.Context(), ports[0]); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("somebody else's port: %v", err)
	}
	broken := New(Config{Processes: func() ([]int, error) { return nil, io.ErrUnexpectedEOF }})
	if _, err := broken.Dial(t.Context(), ports[0]); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("processes unknown: %v", err)
	}
}

// Ports come and go many times; each change is told, within two seconds.
func TestFollow(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	own := func() ([]int, error) { return []int{os.Getpid()}, nil }
	changes := make(chan []wire.Port)
	done := make(chan error)
	go func() {
		done <- New(Config{Processes: own, Interval: 10 * time.Millisecond}).Follow(ctx, func(p []wire.Port) error {
			select {
			case changes <- p:
			case <-ctx.Done():
			}
			return nil
		})
	}()
	has := func(list []wire.Port, port int) bool {
		return slices.ContainsFunc(list, func(p wire.Port) bool { return int(p.Port) == port })
	}
	<-changes
	for range 20 {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		port := ln.Addr().(*net.TCPAddr).Port
		for !has(<-changes, port) { //nolint:revive // waits for the event
		}
		if err := ln.Close(); err != nil {
			t.Fatal(err)
		}
		for has(<-changes, port) { //nolint:revive // as above
		}
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("open and close took %v to be seen", took)
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	stop := errors.New("enough")
	if err := New(Config{}).Follow(t.Context(), func([]wire.Port) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("got %v", err)
	}
}

// A socket that was a stranger's becomes ours without the table changing: a dial
// finds it at once, a watch after a few looks.
func TestHandedOver(t *testing.T) {
	t.Parallel()
	pid, ports, _ := program(t, "127.0.0.1:0")
	var ours []int
	w := New(Config{Processes: func() ([]int, error) { return ours, nil }})
	if _, err := w.Dial(t.Context(), ports[0]); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a stranger's port: %v", err)
	}
	ours = []int{pid}
	c, err := w.Dial(t.Context(), ports[0])
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close() // nothing was exchanged
	again := New(Config{Processes: func() ([]int, error) { return ours, nil }})
	ours = nil
	if list, err := again.List(); err != nil || len(list) != 0 {
		t.Errorf("a stranger's: %v, %v", list, err)
	}
	ours = []int{pid}
	for range strangerLooks {
		if _, err := again.List(); err != nil {
			t.Fatal(err)
		}
	}
	if list, err := again.List(); err != nil || len(list) != 1 {
		t.Errorf("ours by now: %v, %v", list, err)
	}
}
