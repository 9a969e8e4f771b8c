package dnsd

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/net/ipv4"
)

const (
	loadNames  = 1000
	loadRounds = 7
	loadRound  = time.Second
	loadWindow = 32 // questions of one asker under way at once
	loadAskers = 2
)

func loadAddr(i int) netip.Addr {
	return netip.AddrFrom4([4]byte{127, 88, byte(i >> 8), byte(i)})
}

// serveForLoad is the whole of the child that is measured. It ends with SIGTERM.
func serveForLoad(addr string) error {
	hosts := make(map[string]Answer)
	for i := range loadNames {
		hosts[fmt.Sprintf("host%d", i)] = Answer{A: loadAddr(i)}
	}
	s, err := New(Config{Zones: []string{"helix.local", "helix.internal"}, Lookup: func(host string) (Answer, bool) {
		a, ok := hosts[host]
		return a, ok
	}})
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	var lc net.ListenConfig
	udp, err := lc.ListenPacket(ctx, "udp", addr)
	if err != nil {
		return err
	}
	return s.Serve(ctx, udp, nil)
}

func BenchmarkAnswer(b *testing.B) {
	s := newServer(b)
	edns := new(dns.Msg).SetQuestion("demo.helix.local.", dns.TypeA)
	withOption, err := edns.SetEdns0(1232, false).Pack()
	if err != nil {
		b.Fatal(err)
	}
	for name, msg := range map[string][]byte{
		"A":        question(b, "demo.helix.local.", dns.TypeA),
		"empty":    question(b, "demo.helix.local.", dns.TypeHTTPS),
		"nxdomain": question(b, "nobody.helix.local.", dns.TypeA),
		"edns":     withOption,
		"long way": question(b, "helix.local.", dns.TypeSOA),
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			out := make([]byte, 0, maxUDPSize)
			for b.Loop() {
				if out = s.answer(out[:0], msg, udpTransport); len(out) == 0 {
					b.Fatal("no answer")
				}
			}
		})
	}
}

// BenchmarkAgainstDnsmasq measures questions a second over UDP, and processor time a
// question, against dnsmasq with the same names: both as child processes, in
// turns, medians. The askers use the same processors as the servers.
func BenchmarkAgainstDnsmasq(b *testing.B) {
	folder := b.TempDir()
	var lines strings.Builder
	for i := range loadNames {
		fmt.Fprintf(&lines, "%s host%d.helix.local\n", loadAddr(i), i)
	}
	hosts := filepath.Join(folder, "hosts")
	if err := os.WriteFile(hosts, []byte(lines.String()), 0o644); err != nil {
		b.Fatal(err)
	}
	for _, f := range []string{folder, filepath.Dir(folder)} { // dnsmasq reads it as another user
		if err := os.Chmod(f, 0o755); err != nil {
			b.Fatal(err)
		}
	}
	ours := exec.CommandContext(b.Context(), os.Args[0])
	oursAt := freeAddr(b)
	ours.Env = append(os.Environ(), serveEnv+"="+oursAt)
	theirsAt := freeAddr(b)
	_, port, err := net.SplitHostPort(theirsAt)
	if err != nil {
		b.Fatal(err)
	}
	theirs := exec.CommandContext(b.Context(), "dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null", "--pid-file=",
		"--no-resolv", "--no-hosts", "--addn-hosts="+hosts, "--port="+port, "--listen-address=127.0.0.1", "--bind-interfaces",
		"--local=/helix.local/", "--local-ttl=5", "--cache-size=10000")
	sides := []struct {
		name, addr string
		cmd        *exec.Cmd
		rates      []float64
		answers    float64
		cpu        float64
	}{{name: "ours", addr: oursAt, cmd: ours}, {name: "dnsmasq", addr: theirsAt, cmd: theirs}}
	for _, s := range sides {
		s.cmd.Stderr = os.Stderr
		if err := s.cmd.Start(); err != nil {
			b.Fatal(err)
		}
		waitFor(b, s.addr)
	}
	for range loadRounds {
		for i := range sides {
			n := load(b, sides[i].addr, loadRound)
			sides[i].rates = append(sides[i].rates, float64(n)/loadRound.Seconds())
			sides[i].answers += float64(n)
		}
	}
	for i := range sides {
		s := &sides[i]
		if err := s.cmd.Process.Signal(syscall.SIGTERM); err != nil {
			b.Error(err)
		}
		_ = s.cmd.Wait() // dnsmasq's exit code after SIGTERM says nothing
		s.cpu = float64(s.cmd.ProcessState.UserTime()+s.cmd.ProcessState.SystemTime()) / s.answers
		slices.Sort(s.rates)
		b.ReportMetric(s.rates[len(s.rates)/2], s.name+"-questions/s")
		b.ReportMetric(s.cpu, s.name+"-cpu-ns/question")
	}
	b.ReportMetric(sides[0].rates[loadRounds/2]/sides[1].rates[loadRounds/2], "ratio-questions")
	b.ReportMetric(sides[0].cpu/sides[1].cpu, "ratio-cpu")
	b.ReportMetric(0, "ns/op")
	b.Logf("GOMAXPROCS %d, %d askers with %d questions under way each, %d rounds", runtime.GOMAXPROCS(0), loadAskers, loadWindow, loadRounds)
}

// freeAddr returns an address whose UDP port nobody uses.
func freeAddr(b *testing.B) string {
	b.Helper()
	var lc net.ListenConfig
	c, err := lc.ListenPacket(b.Context(), "udp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	return c.LocalAddr().String()
}

// waitFor asks until somebody answers.
func waitFor(b *testing.B, addr string) {
	b.Helper()
	c := dial(b, "udp", addr)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); <-tick.C {
		if _, err := c.Write(question(b, "host1.helix.local.", dns.TypeA)); err != nil {
			continue // refused: not there yet
		}
		if err := c.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
			b.Fatal(err)
		}
		in := make([]byte, 512)
		if n, err := c.Read(in); err == nil && len(unpack(b, in[:n]).Answer) == 1 {
			return
		}
	}
	b.Fatalf("nobody answers at %s", addr)
}

// load asks for the given time and returns how many answers came.
func load(b *testing.B, addr string, d time.Duration) int {
	b.Helper()
	counts := make([]int, loadAskers)
	var all sync.WaitGroup
	for i := range counts {
		c := dial(b, "udp", addr)
		all.Go(func() {
			var err error
			if counts[i], err = ask(b, c, d); err != nil {
				b.Error(err)
			}
			_ = c.Close()
		})
	}
	all.Wait()
	total := 0
	for _, n := range counts {
		total += n
	}
	return total
}

// ask keeps loadWindow questions under way, many to a system call so that asking
// costs little beside answering.
func ask(b *testing.B, c net.Conn, d time.Duration) (int, error) {
	conn := ipv4.NewPacketConn(c.(*net.UDPConn))
	out, in := make([]ipv4.Message, loadWindow), make([]ipv4.Message, loadWindow)
	for i := range in {
		in[i].Buffers = [][]byte{make([]byte, 512)}
	}
	count, next, free := 0, 0, loadWindow
	for end := time.Now().Add(d); time.Now().Before(end); {
		for i := range free {
			q := question(b, fmt.Sprintf("host%d.helix.local.", next%loadNames), dns.TypeA)
			binary.BigEndian.PutUint16(q, uint16(next))
			out[i].Buffers = [][]byte{q}
			next++
		}
		for sent := 0; sent < free; {
			n, err := conn.WriteBatch(out[sent:free], 0)
			if err != nil {
				return count, err
			}
			sent += n
		}
		if err := c.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
			return count, err
		}
		n, err := conn.ReadBatch(in, 0)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return count, fmt.Errorf("answers were lost: %w", err)
		}
		if err != nil {
			return count, err
		}
		for _, m := range in[:n] {
			if m.N < headerSize || m.Buffers[0][7] != 1 {
				return count, fmt.Errorf("a wrong answer: %x", m.Buffers[0][:m.N])
			}
		}
		count, free = count+n, n
	}
	return count, nil
}
