package vmctl

import (
	"bufio"
	"context"
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"helix.local/helix/vmctl/guestnet"
	"helix.local/helix/vmctl/image"
)

const bootSecret = "c2VjcmV0LW9mLXRoZS10ZXN0"

// imageDir is where testImage keeps its store, "" before it was asked.
var imageDir string

// testImage builds the image of the tests once. Packages it needs are kept in the
// user's cache folder between runs.
var testImage = sync.OnceValues(func() (image.Image, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return image.Image{}, err
	}
	dir, err := os.MkdirTemp("", "vmctl-image-")
	if err != nil {
		return image.Image{}, err
	}
	imageDir = dir
	store, err := image.Open(image.Config{Root: dir})
	if err != nil {
		return image.Image{}, err
	}
	return store.Build(context.Background(), "tiny", image.BuildConfig{Agent: os.Getenv("VMCTL_TEST_GUEST"), Cache: filepath.Join(cache, "helix-test")})
})

// shortDir is a folder whose path leaves room for socket names.
func shortDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "vm")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func testMachine(t testing.TB) (Machine, Host) {
	t.Helper()
	if os.Getenv("VMCTL_TEST_GUEST") == "" {
		t.Setenv("VMCTL_TEST_GUEST", buildGuest(t))
	}
	img, err := testImage()
	if err != nil {
		t.Fatal(err)
	}
	host, err := ProbeHost(t.Context(), ProbeConfig{})
	if err != nil {
		t.Fatal(err)
	}
	return Machine{
		Name: "demo", UUID: uuid.NewString(), Generation: 7, MemoryMB: 256, Image: img,
		RunDir: filepath.Join(shortDir(t), "vm"), Policy: guestnet.PolicyInternet,
	}, host
}

func startConfig(t testing.TB) StartConfig {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return StartConfig{Helix: self, Boot: []byte(`{"token":"` + bootSecret + `"}`)}
}

// startMachine starts m and takes care that nothing of it stays.
func startMachine(t testing.TB, m Machine, h Host) *VM {
	t.Helper()
	p, err := NewPlan(m, h)
	if err != nil {
		t.Fatal(err)
	}
	vm, err := Start(t.Context(), p, startConfig(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		if _, err := vm.Kill(ctx); err != nil {
			t.Error(err)
		}
	})
	return vm
}

// guest is the control port of a guest of the tests.
type guest struct {
	t    testing.TB
	conn net.Conn
	in   *bufio.Scanner
}

type guestRequest struct {
	Do      string
	Network string `json:",omitempty"`
	Addr    string `json:",omitempty"`
	Send    string `json:",omitempty"`
	Half    bool   `json:",omitempty"`
}

type guestAnswer struct {
	OK    bool
	Text  string
	Error string
	Took  time.Duration
}

// meet waits for a guest's hello.
func meet(t testing.TB, vm *VM) (*guest, string) {
	t.Helper()
	conn, err := vm.DialSerial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	g := &guest{t, conn, bufio.NewScanner(conn)}
	hello := g.read()
	if !strings.HasPrefix(hello.Text, "hello ") {
		t.Fatalf("guest said %+v", hello)
	}
	return g, hello.Text
}

func (g *guest) read() guestAnswer {
	g.t.Helper()
	var a guestAnswer
	if !g.in.Scan() {
		g.t.Fatalf("guest is gone: %v", g.in.Err())
	}
	if err := json.Unmarshal(g.in.Bytes(), &a); err != nil {
		g.t.Fatalf("guest said %q: %v", g.in.Text(), err)
	}
	return a
}

func (g *guest) ask(r guestRequest) guestAnswer {
	g.t.Helper()
	g.tell(r)
	return g.read()
}

func (g *guest) tell(r guestRequest) {
	g.t.Helper()
	if err := json.NewEncoder(g.conn).Encode(r); err != nil {
		g.t.Fatal(err)
	}
}

func TestBootTalkAndStop(t *testing.T) {
	m, h := testMachine(t)
	begin := time.Now()
	vm := startMachine(t, m, h)
	t.Logf("running after %v on %s with %s", time.Since(begin), vm.Plan().Machine, vm.Plan().Accel)
	g, hello := meet(t, vm)
	t.Logf("hello after %v: %s", time.Since(begin), hello)
	if !strings.Contains(hello, bootSecret) {
		t.Errorf("guest has not got its boot secret: %s", hello)
	}
	st, err := vm.Status(t.Context())
	if err != nil || st.State != Running || st.UUID != m.UUID || st.Generation != 7 {
		t.Errorf("status is %+v, %v", st, err)
	}
	nw, err := vm.Network(t.Context())
	if err != nil || !nw.Matches || nw.Enforced.Policy != guestnet.PolicyInternet || !nw.Enforced.Cable || nw.MAC != vm.Plan().Network.MAC {
		t.Errorf("network is %+v, %v", nw, err)
	}
	if a := g.ask(guestRequest{Do: "net"}); !a.OK || a.Text != "10.188.0.2/24 10.188.0.1 10.188.0.1 65520" {
		t.Errorf("dhcp gave %+v", a)
	}
	exit, err := vm.Stop(t.Context(), StopConfig{AgentShutdown: func(context.Context) error {
		g.tell(guestRequest{Do: "poweroff"})
		return nil
	}})
	if err != nil || exit.State != Exited || exit.Reason != ExitGuestShutdown || exit.Phase != PhaseAgent {
		t.Errorf("stop gave %+v, %v", exit, err)
	}
}
