// Command guest is the first process of the guests in the tests: it loads the
// drivers, says hello on the control port, and does what the test asks there, one
// JSON line a request and one an answer.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

type request struct {
	Do      string
	Network string
	Addr    string
	Send    string
	Half    bool // half-close after sending, then read to the end
}

type answer struct {
	OK    bool
	Text  string
	Error string
	Took  time.Duration
}

func main() {
	if err := serve(); err != nil {
		fmt.Println("guest:", err)
	}
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	select {}
}

func serve() error {
	fmt.Println("guest: first line of user space")
	for _, m := range [][3]string{{"proc", "/proc", "proc"}, {"sys", "/sys", "sysfs"}, {"dev", "/dev", "devtmpfs"}} {
		if err := unix.Mount(m[0], m[1], m[2], 0, ""); err != nil && !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("mount %s: %w", m[1], err)
		}
	}
	if err := loadModules(); err != nil {
		return err
	}
	port, err := openPort("org.helix.control")
	if err != nil {
		return err
	}
	boot, err := os.ReadFile("/sys/firmware/qemu_fw_cfg/by_name/opt/helix/boot/raw")
	if err != nil {
		return err
	}
	uptime, err := os.ReadFile("/proc/uptime")
	if err != nil {
		return err
	}
	out := json.NewEncoder(port)
	if err := out.Encode(answer{OK: true, Text: "hello " + string(boot) + " up " + string(uptime)}); err != nil {
		return err
	}
	in := bufio.NewScanner(port)
	for in.Scan() {
		var r request
		if err := json.Unmarshal(in.Bytes(), &r); err != nil {
			return err
		}
		start := time.Now()
		text, err := do(r)
		a := answer{OK: err == nil, Text: text, Took: time.Since(start)}
		if err != nil {
			a.Error = err.Error()
		}
		if err := out.Encode(a); err != nil {
			return err
		}
		if r.Do == "poweroff" {
			return nil
		}
	}
	return in.Err()
}

func loadModules() error {
	list, err := os.ReadFile("/lib/helix/modules")
	if err != nil {
		return err
	}
	for name := range strings.FieldsSeq(string(list)) {
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		err = unix.FinitModule(int(f.Fd()), "", 0)
		_ = f.Close() // read side only
		if err != nil && !errors.Is(err, unix.EEXIST) && !errors.Is(err, unix.ENODEV) {
			return fmt.Errorf("load %s: %w", name, err)
		}
	}
	return nil
}

func openPort(name string) (*os.File, error) {
	again := time.NewTicker(time.Millisecond)
	defer again.Stop()
	for ; ; <-again.C {
		found, err := filepath.Glob("/sys/class/virtio-ports/*/name")
		if err != nil {
			return nil, err
		}
		for _, path := range found {
			if is, err := os.ReadFile(path); err == nil && strings.TrimSpace(string(is)) == name {
				return os.OpenFile("/dev/"+filepath.Base(filepath.Dir(path)), os.O_RDWR, 0)
			}
		}
	}
}

func do(r request) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	switch r.Do {
	case "net":
		return network(ctx)
	case "talk":
		return talk(ctx, r)
	case "lookup":
		hosts, err := net.DefaultResolver.LookupHost(ctx, r.Addr)
		return strings.Join(hosts, " "), err
	case "disk":
		text, err := os.ReadFile("/sys/class/block/vda/size")
		return strings.TrimSpace(string(text)), err
	case "console":
		for range 40000 {
			fmt.Println("0123456789012345678901234567890123456789012345678901234567890123456789")
		}
	case "crash":
		return "", os.WriteFile("/proc/sysrq-trigger", []byte("c"), 0)
	case "reboot":
		return "", unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
	case "poweroff", "ping":
	default:
		return "", errors.New("unknown request")
	}
	return "", nil
}

// network configures eth0 as DHCP says, and returns what it said.
func network(ctx context.Context) (string, error) {
	link, err := netlink.LinkByName("eth0")
	if err != nil {
		return "", err
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return "", err
	}
	client, err := nclient4.New("eth0")
	if err != nil {
		return "", err
	}
	defer client.Close()
	lease, err := client.Request(ctx)
	if err != nil {
		return "", err
	}
	ack := lease.ACK
	mtu, err := dhcpv4.GetUint16(dhcpv4.OptionInterfaceMTU, ack.Options)
	if err != nil {
		return "", err
	}
	if err := netlink.LinkSetMTU(link, int(mtu)); err != nil {
		return "", err
	}
	addr := &netlink.Addr{IPNet: &net.IPNet{IP: ack.YourIPAddr, Mask: ack.SubnetMask()}}
	if err := netlink.AddrAdd(link, addr); err != nil {
		return "", err
	}
	if err := netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: ack.Router()[0]}); err != nil {
		return "", err
	}
	resolv := fmt.Sprintf("nameserver %s\n", ack.DNS()[0])
	if err := os.WriteFile("/etc/resolv.conf", []byte(resolv), 0o644); err != nil {
		return "", err
	}
	return fmt.Sprintf("%s %s %s %d", addr, ack.Router()[0], ack.DNS()[0], mtu), nil
}

func talk(ctx context.Context, r request) (string, error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, r.Network, r.Addr)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	deadline, _ := ctx.Deadline()
	if err := conn.SetDeadline(deadline); err != nil {
		return "", err
	}
	if _, err := conn.Write([]byte(r.Send)); err != nil {
		return "", err
	}
	if half, ok := conn.(*net.TCPConn); ok && r.Half {
		if err := half.CloseWrite(); err != nil {
			return "", err
		}
		body, err := io.ReadAll(conn)
		return string(body), err
	}
	buf := make([]byte, 64<<10)
	n, err := conn.Read(buf)
	return string(buf[:n]), err
}
