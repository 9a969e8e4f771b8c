package front

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var loopback = netip.MustParseAddr("127.0.0.1")

// freePort is a port that nothing listened on a moment ago.
func freePort(t *testing.T) uint16 {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	return uint16(ln.Addr().(*net.TCPAddr).Port)
}

// taken listens on addr, as another program would.
func taken(t *testing.T, addr string) netip.AddrPort {
	t.Helper()
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	return netip.MustParseAddrPort(ln.Addr().String())
}

func TestBindFallsBackAndNamesTheHolder(t *testing.T) {
	for _, on := range []string{"127.0.0.1:0", "0.0.0.0:0"} {
		holder := taken(t, on)
		want := netip.AddrPortFrom(loopback, holder.Port())
		fallback := freePort(t)
		ln, res, err := Bind(t.Context(), want, fallback)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = ln.Close() }()
		if !res.Fallback() || res.Wanted != want || res.Got != netip.AddrPortFrom(loopback, fallback) || !errors.Is(res.Why, syscall.EADDRINUSE) {
			t.Errorf("got %+v", res)
		}
		me := fmt.Sprintf("(pid %d) on %s", os.Getpid(), holder)
		if !strings.Contains(res.Holder, me) || !strings.Contains(res.String(), res.Holder) {
			t.Errorf("got %q and %q, want %q", res.Holder, res, me)
		}
		_, _, err = Bind(t.Context(), want, 0)
		if bad, ok := errors.AsType[*BindError](err); !ok || !errors.Is(err, syscall.EADDRINUSE) || !strings.Contains(err.Error(), me) || !strings.Contains(bad.Hint(), "stop") {
			t.Errorf("no fallback: got %v", err)
		}
		// Both taken: both are named.
		_, _, err = Bind(t.Context(), want, fallback)
		if err == nil || strings.Count(err.Error(), "(pid") != 2 {
			t.Errorf("both taken: got %v", err)
		}
	}
}

func TestBindTakesWhatIsFree(t *testing.T) {
	ln, res, err := Bind(t.Context(), netip.AddrPortFrom(loopback, 0), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	if res.Fallback() || res.Got.Port() == 0 || res.String() != "listening on "+res.Got.String() {
		t.Errorf("got %+v", res)
	}
	udp, res, err := BindPacket(t.Context(), netip.AddrPortFrom(loopback, 0), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = udp.Close() }()
	second, res2, err := BindPacket(t.Context(), res.Got, freePort(t))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = second.Close() }()
	if !res2.Fallback() || !strings.Contains(res2.Holder, fmt.Sprintf("(pid %d)", os.Getpid())) {
		t.Errorf("UDP: got %+v", res2)
	}
}

func TestBindErrorsHaveHints(t *testing.T) {
	_, _, err := Bind(t.Context(), netip.MustParseAddrPort("192.0.2.1:80"), 10080)
	bad, ok := errors.AsType[*BindError](err)
	if !ok || !errors.Is(err, syscall.EADDRNOTAVAIL) || !strings.Contains(bad.Hint(), "loopback") || !strings.Contains(err.Error(), "192.0.2.1:80") {
		t.Errorf("got %v", err)
	}
	if _, _, err := BindPacket(t.Context(), netip.MustParseAddrPort("192.0.2.1:53"), 0); err == nil {
		t.Error("UDP on an address of somebody else")
	}
	for _, c := range []struct {
		err  error
		hint string
	}{{syscall.EACCES, "root"}, {syscall.EADDRINUSE, "stop"}, {errors.New("x"), ""}} {
		if got := (&BindError{Err: c.err}).Hint(); !strings.Contains(got, c.hint) || c.hint == "" && got != "" {
			t.Errorf("%v: got hint %q", c.err, got)
		}
	}
	if os.Geteuid() != 0 && !unprivileged() {
		low := netip.AddrPortFrom(loopback, 22)
		ln, res, err := Bind(t.Context(), low, freePort(t))
		if err != nil || !res.Fallback() {
			t.Errorf("no privilege: got %+v, %v", res, err)
			return
		}
		_ = ln.Close()
	}
}

// unprivileged reports whether this system lets everybody bind low ports.
func unprivileged() bool {
	ln, err := net.Listen("tcp", "127.0.0.1:23")
	if err == nil {
		_ = ln.Close()
	}
	return !errors.Is(err, syscall.EACCES)
}

func TestResultInWords(t *testing.T) {
	a, b := netip.MustParseAddrPort("127.88.0.5:22"), netip.MustParseAddrPort("127.88.0.5:10022")
	for want, r := range map[string]Result{
		"listening on 127.88.0.5:22":                                                                   {Wanted: a, Got: a},
		"listening on 127.88.0.5:10022: 127.88.0.5:22: permission denied":                              {Wanted: a, Got: b, Why: syscall.EACCES},
		"listening on 127.88.0.5:10022: 127.88.0.5:22 is taken by sshd (pid 812) on 0.0.0.0:22":        {Wanted: a, Got: b, Why: syscall.EADDRINUSE, Holder: "sshd (pid 812) on 0.0.0.0:22"},
		"listening on 127.88.0.5:10022: 127.88.0.5:22 is taken by a process of another user on [::]:1": {Wanted: a, Got: b, Why: syscall.EADDRINUSE, Holder: describe("", 0, socket{local: netip.MustParseAddrPort("[::]:1")})},
	} {
		if r.String() != want {
			t.Errorf("got %q, want %q", r, want)
		}
	}
	if got := describe("", 7, socket{local: a}); got != "a process (pid 7) on 127.88.0.5:22" {
		t.Errorf("got %q", got)
	}
	if got := joinHolders("", a, "x (pid 1) on y", b); got != "x (pid 1) on y (and no privilege for port 22)" {
		t.Errorf("got %q", got)
	}
}
