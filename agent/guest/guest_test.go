//go:build linux

package guest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/vishvananda/netlink"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

var update = flag.Bool("update", false, "rewrite golden files")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestMountTable(t *testing.T) {
	t.Parallel()
	var text strings.Builder
	seen := map[string]bool{"/": true}
	for _, m := range mounts() {
		fmt.Fprintf(&text, "%s on %s type %s flags %#x data %q folder %v\n", m.source, m.target, m.kind, m.flags, m.data, m.mode)
		if seen[m.target] {
			t.Errorf("%s mounted twice", m.target)
		}
		seen[m.target] = true
	}
	golden := filepath.Join("testdata", "mounts.golden")
	if *update {
		if err := os.WriteFile(golden, []byte(text.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil || text.String() != string(want) {
		t.Errorf("%v; got\n%s", err, text.String())
	}
}

func TestModuleList(t *testing.T) {
	t.Parallel()
	got, err := parseModules("# note\n/lib/a.ko\n\n  /lib/b.ko  \n")
	if err != nil || !slices.Equal(got, []string{"/lib/a.ko", "/lib/b.ko"}) {
		t.Errorf("got %q, %v", got, err)
	}
	if _, err := parseModules("a.ko\n"); err == nil {
		t.Error("relative path accepted")
	}
}

func TestLoadModules(t *testing.T) {
	t.Parallel()
	none := func(string) { t.Error("loaded something") }
	dir := t.TempDir()
	if err := LoadModules(filepath.Join(dir, "none"), none); err != nil {
		t.Errorf("no list: %v", err)
	}
	list := filepath.Join(dir, "list")
	bad := filepath.Join(dir, "bad.ko")
	write(t, bad, "not a module")
	write(t, list, dir+"/missing.ko\n"+bad+"\n")
	err := LoadModules(list, none)
	if !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "bad.ko") {
		t.Errorf("got %v, want both modules named", err)
	}
	write(t, list, "relative")
	if err := LoadModules(list, none); err == nil {
		t.Error("bad list accepted")
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func FuzzModuleList(f *testing.F) {
	f.Add("# note\n/lib/a.ko\n")
	f.Fuzz(func(t *testing.T, text string) {
		list, err := parseModules(text)
		if err != nil {
			return
		}
		again, err := parseModules(strings.Join(list, "\n"))
		if err != nil || !slices.Equal(again, list) {
			t.Errorf("round trip: %q, %v; want %q", again, err, list)
		}
	})
}

func TestDevices(t *testing.T) {
	t.Parallel()
	sys := t.TempDir()
	if _, err := serialDevice(sys, ControlPort); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no port: %v", err)
	}
	write(t, sys+"/class/virtio-ports/vport0p1/name", "other\n")
	write(t, sys+"/class/virtio-ports/vport0p2/name", ControlPort+"\n")
	if got, err := serialDevice(sys, ControlPort); err != nil || got != "vport0p2" {
		t.Errorf("got %q, %v", got, err)
	}
	write(t, sys+"/bus/virtio/devices/virtio0/device", "0x0001\n")
	if !hasVirtio(sys, virtioNet) || hasVirtio(sys, virtioBlock) {
		t.Error("virtio devices not told apart")
	}
	if err := Await(t.Context(), sys, nil); err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Await(ctx, sys+"/none", nil); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	closed := make(chan struct{})
	close(closed)
	if err := Await(t.Context(), sys+"/none", closed); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v", err)
	}
	if _, err := OpenControl(ctx); err == nil {
		t.Error("control port on a machine that has none")
	}
	if f, err := openConnected("/dev/null"); err != nil || f == nil {
		t.Errorf("a connected device: %v", err)
	} else if err := f.Close(); err != nil {
		t.Error(err)
	}
	if _, err := openConnected(sys + "/none"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a device that is not there: %v", err)
	}
}

// The label is read from what mke2fs really writes.
func TestDiskLabel(t *testing.T) {
	t.Parallel()
	disk := filepath.Join(t.TempDir(), "disk")
	write(t, disk, "")
	if err := os.Truncate(disk, 4<<20); err != nil {
		t.Fatal(err)
	}
	mount := func() error {
		t.Helper()
		f, err := openDisk(t.Context(), disk)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close() //nolint:errcheck // read only
		return mountDisk(f, t.TempDir())
	}
	if err := mount(); err == nil || !strings.Contains(err.Error(), "not an ext4 file system") {
		t.Errorf("empty disk: %v", err)
	}
	mke2fs := exec.Command("mke2fs", "-q", "-t", "ext4", "-L", "elsewhere", disk)
	mke2fs.Env = append(os.Environ(), "PATH="+os.Getenv("PATH")+":/usr/sbin:/sbin")
	if out, err := mke2fs.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	f, err := os.Open(disk)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close() //nolint:errcheck // read only
	if label, err := ext4Label(f); err != nil || label != "elsewhere" {
		t.Errorf("got %q, %v", label, err)
	}
	if err := mount(); err == nil || !strings.Contains(err.Error(), `label "elsewhere"`) {
		t.Errorf("another disk: %v", err)
	}
	late, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := openDisk(late, disk+"-none"); !errors.Is(err, fs.ErrNotExist) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("no disk: %v", err)
	}
}

// The driver makes the device before it can be opened.
func TestDiskIsAwaited(t *testing.T) {
	t.Parallel()
	disk := filepath.Join(t.TempDir(), "disk")
	opened := make(chan error, 1)
	go func() {
		f, err := openDisk(t.Context(), disk)
		if err == nil {
			err = f.Close()
		}
		opened <- err
	}()
	write(t, disk, "")
	if err := <-opened; err != nil {
		t.Error(err)
	}
}

func FuzzDiskLabel(f *testing.F) {
	super := make([]byte, 2048)
	binary.LittleEndian.PutUint16(super[1024+0x38:], 0xEF53)
	copy(super[1024+0x78:], "helix-ws")
	f.Add(super)
	f.Fuzz(func(t *testing.T, b []byte) {
		label, err := ext4Label(bytes.NewReader(b))
		if err == nil && (len(label) > 16 || strings.ContainsRune(label, 0)) {
			t.Errorf("label %q", label)
		}
	})
}

func TestLease(t *testing.T) {
	t.Parallel()
	ack, err := dhcpv4.New(
		dhcpv4.WithYourIP(net.IPv4(10, 188, 0, 2)), dhcpv4.WithNetmask(net.CIDRMask(24, 32)),
		dhcpv4.WithRouter(net.IPv4(10, 188, 0, 1)), dhcpv4.WithDNS(net.IPv4(10, 188, 0, 1), net.IPv4(9, 9, 9, 9)),
		dhcpv4.WithGeneric(dhcpv4.OptionInterfaceMTU, []byte{0x80, 0x00}),
	)
	if err != nil {
		t.Fatal(err)
	}
	lease, err := parseLease(ack)
	if err != nil || lease.Address != "10.188.0.2/24" || lease.Router != "10.188.0.1" || lease.MTU != 32768 {
		t.Errorf("got %+v, %v", lease, err)
	}
	if got := resolvConf(lease.DNS); got != "nameserver 10.188.0.1\nnameserver 9.9.9.9\n" {
		t.Errorf("got %q", got)
	}
	empty, err := dhcpv4.New()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := parseLease(empty); err == nil {
		t.Error("lease without an address accepted")
	}
}

func TestHosts(t *testing.T) {
	t.Parallel()
	if got := hosts("demo", "helix.local"); got != "127.0.0.1 localhost\n::1 localhost\n127.0.1.1 demo.helix.local demo\n" {
		t.Errorf("got %q", got)
	}
	if got := hosts("demo", ""); !strings.HasSuffix(got, "127.0.1.1 demo\n") {
		t.Errorf("got %q", got)
	}
}

func event(kind, code uint16, value uint32) []byte {
	b := make([]byte, eventSize)
	binary.NativeEndian.PutUint16(b[16:], kind)
	binary.NativeEndian.PutUint16(b[18:], code)
	binary.NativeEndian.PutUint32(b[20:], value)
	return b
}

func TestPowerButton(t *testing.T) {
	t.Parallel()
	presses := 0
	stream := slices.Concat(event(1, keyPower, 0), event(0, 0, 0), event(1, 30, 1), event(1, keyPower, 1), []byte("cut"))
	readButton(bytes.NewReader(stream), func() { presses++ })
	if presses != 1 {
		t.Errorf("%d presses, want 1", presses)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := PowerButton(ctx, func() {}); err != nil && !errors.Is(err, fs.ErrPermission) {
		t.Error(err)
	}
}

func TestClockLeftAlone(t *testing.T) {
	t.Parallel()
	if off, stepped, err := SetClock(time.Now().Add(100 * time.Millisecond)); stepped || err != nil || off.Abs() > time.Second {
		t.Errorf("%v %v %v", off, stepped, err)
	}
}

func TestPrograms(t *testing.T) {
	t.Parallel()
	cmd := exec.Command("cat")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	found, err := programs()
	if err != nil || !slices.Contains(found, cmd.Process.Pid) || slices.Contains(found, os.Getpid()) {
		t.Errorf("%v, %v", found, err)
	}
	if err := errors.Join(in.Close(), cmd.Wait()); err != nil {
		t.Error(err)
	}
}

func TestSeedRandom(t *testing.T) {
	t.Parallel()
	if err := SeedRandom(filepath.Join(t.TempDir(), "none"), nil); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no device: %v", err)
	}
	if err := SeedRandom("/dev/null", []byte("x")); err == nil {
		t.Error("a device without a generator took a seed")
	}
}

// The steps that change a machine, on a thread with namespaces of its own. The
// thread is not given back, so that nothing else ever runs in them.
func TestInNamespaces(t *testing.T) {
	if os.Geteuid() != 0 {
		return // namespaces are for root; everything pure is tested above
	}
	t.Parallel()
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWUTS); err != nil {
			t.Errorf("unshare: %v", err)
			return
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			t.Errorf("keep mounts private: %v", err)
			return
		}
		inNetwork(t)
		inMounts(t)
	}()
	<-done
}

func inNetwork(t *testing.T) {
	etc := t.TempDir()
	if err := Loopback(); err != nil {
		t.Error(err)
	}
	if err := SetHostname("demo", "helix.local", etc); err != nil {
		t.Error(err)
	}
	if name, err := os.Hostname(); err != nil || name != "demo" {
		t.Errorf("host name %q, %v", name, err)
	}
	if err := CheckNetwork(Lease{}); err == nil {
		t.Error("network without a card is fine")
	}
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: netDevice}, PeerName: "server"}
	if err := netlink.LinkAdd(veth); err != nil {
		t.Errorf("add cards: %v", err)
		return
	}
	server, err := netlink.LinkByName("server")
	if err == nil {
		err = errors.Join(netlink.LinkSetUp(server), netlink.AddrAdd(server, &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(10, 188, 0, 1), Mask: net.CIDRMask(24, 32)}}))
	}
	if err != nil {
		t.Errorf("server's card: %v", err)
		return
	}
	dnsmasq := exec.Command("dnsmasq", "--no-daemon", "--conf-file=/dev/null", "--port=0", "--interface=server", "--bind-interfaces",
		"--dhcp-range=10.188.0.2,10.188.0.2,255.255.255.0,1h", "--dhcp-option=option:router,10.188.0.1", "--dhcp-option=option:dns-server,10.188.0.1",
		"--dhcp-option=option:mtu,1400", "--dhcp-leasefile="+filepath.Join(etc, "leases"), "--user=root")
	var said bytes.Buffer
	dnsmasq.Stderr = &said
	if err := dnsmasq.Start(); err != nil {
		t.Errorf("start the dhcp server: %v", err)
		return
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	lease, err := configure(ctx, etc)
	_ = dnsmasq.Process.Kill() // ours
	_ = dnsmasq.Wait()
	if err != nil || lease.Address != "10.188.0.2/24" || lease.MTU != 1400 {
		t.Errorf("got %+v, %v; server: %s", lease, err, said.String())
		return
	}
	if resolv, err := os.ReadFile(etc + "/resolv.conf"); err != nil || string(resolv) != "nameserver 10.188.0.1\n" {
		t.Errorf("resolv.conf: %q, %v", resolv, err)
	}
	if err := CheckNetwork(lease); err != nil {
		t.Error(err)
	}
	if err := netlink.RouteDel(&netlink.Route{Gw: net.IPv4(10, 188, 0, 1)}); err != nil {
		t.Error(err)
	}
	if err := CheckNetwork(lease); err == nil || !strings.Contains(err.Error(), "no default route") {
		t.Errorf("without a route: %v", err)
	}
	if err := CheckNetwork(Lease{Address: "10.188.0.3/24"}); err == nil || !strings.Contains(err.Error(), "lost its address") {
		t.Errorf("another address: %v", err)
	}
	if err := netlink.LinkSetDown(veth); err != nil {
		t.Error(err)
	}
	if err := CheckNetwork(lease); err == nil || !strings.Contains(err.Error(), "is down") {
		t.Errorf("card down: %v", err)
	}
}

func inMounts(t *testing.T) {
	if err := Mount(); err != nil {
		t.Error(err)
	}
	table, err := os.ReadFile("/proc/thread-self/mountinfo")
	if err != nil {
		t.Error(err)
	}
	for _, m := range mounts() {
		if !strings.Contains(string(table), " "+m.target+" ") {
			t.Errorf("%s is not mounted", m.target)
		}
	}
	// Without a disk the workspace is a folder with its owner.
	dir := filepath.Join("/run", "workspace")
	if hasVirtio("/sys", virtioBlock) {
		return // a machine with such a disk: it is not ours to mount
	}
	if mounted, err := MountWorkspace(t.Context(), dir, 1234, 1234); mounted || err != nil {
		t.Errorf("workspace: %v, %v", mounted, err)
	}
}
