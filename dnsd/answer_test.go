package dnsd

import (
	"bytes"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/miekg/dns"
)

// TestAnswers compares the answers to questions of every kind with
// testdata/answers.golden.
func TestAnswers(t *testing.T) {
	s := newServer(t)
	ask := func(name string, qtype uint16, change ...func(m *dns.Msg)) []byte {
		m := new(dns.Msg).SetQuestion(name, qtype)
		m.Id = 1
		for _, c := range change {
			c(m)
		}
		packed, err := m.Pack()
		if err != nil {
			t.Fatal(name, err)
		}
		return packed
	}
	edns := func(size uint16, do bool) func(m *dns.Msg) { return func(m *dns.Msg) { m.SetEdns0(size, do) } }
	tests := []struct {
		name string
		msg  []byte
	}{
		{"A", ask("demo.helix.local.", dns.TypeA)},
		{"A in the companion zone", ask("demo.helix.internal.", dns.TypeA)},
		{"A in mixed case", ask("DeMo.hELIX.Local.", dns.TypeA)},
		{"AAAA there is none", ask("demo.helix.local.", dns.TypeAAAA)},
		{"AAAA", ask("both.helix.local.", dns.TypeAAAA)},
		{"HTTPS is empty", ask("demo.helix.local.", dns.TypeHTTPS)},
		{"CAA is empty", ask("demo.helix.local.", dns.TypeCAA)},
		{"host without addresses", ask("bare.helix.local.", dns.TypeA)},
		{"gateway", ask("gw.helix.local.", dns.TypeA)},
		{"wildcard child", ask("a.b.demo.helix.local.", dns.TypeA)},
		{"child of an existing name is never NXDOMAIN", ask("_acme-challenge.demo.helix.local.", dns.TypeTXT)},
		{"strange label above an existing name", ask(`a\.b\000.demo.helix.local.`, dns.TypeA)},
		{"unknown name", ask("nobody.helix.local.", dns.TypeA)},
		{"child of an unknown name", ask("demo.nobody.helix.local.", dns.TypeA)},
		{"label with a dot in it", ask(`x\.demo.helix.local.`, dns.TypeA)},
		{"apex A", ask("helix.local.", dns.TypeA)},
		{"apex SOA", ask("Helix.Local.", dns.TypeSOA)},
		{"apex NS", ask("helix.local.", dns.TypeNS)},
		{"NS of a name", ask("demo.helix.local.", dns.TypeNS)},
		{"SOA of a name", ask("demo.helix.local.", dns.TypeSOA)},
		{"ANY", ask("demo.helix.local.", dns.TypeANY)},
		{"ANY of an unknown name", ask("nobody.helix.local.", dns.TypeANY)},
		{"local itself", ask("local.", dns.TypeSOA)},
		{"other name in local", ask("printer.local.", dns.TypeA)},
		{"name that only ends alike", ask("demo.nothelix.local.", dns.TypeA)},
		{"root", ask(".", dns.TypeNS)},
		{"out of zone", ask("example.com.", dns.TypeA)},
		{"out of zone ANY", ask("example.com.", dns.TypeANY)},
		{"AXFR", ask("helix.local.", dns.TypeAXFR)},
		{"IXFR", ask("helix.local.", dns.TypeIXFR)},
		{"class CH", ask("version.bind.", dns.TypeTXT, func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassCHAOS })},
		{"class CH in zone", ask("demo.helix.local.", dns.TypeA, func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassCHAOS })},
		{"class ANY", ask("demo.helix.local.", dns.TypeA, func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassANY })},
		{"PTR", ask("2.0.88.127.in-addr.arpa.", dns.TypePTR)},
		{"PTR of nobody", ask("3.0.88.127.in-addr.arpa.", dns.TypePTR)},
		{"PTR on the way", ask("0.88.127.in-addr.arpa.", dns.TypePTR)},
		{"PTR with a leading zero", ask("02.0.88.127.in-addr.arpa.", dns.TypePTR)},
		{"PTR too large", ask("256.0.88.127.in-addr.arpa.", dns.TypePTR)},
		{"PTR too long", ask("1.2.0.88.127.in-addr.arpa.", dns.TypePTR)},
		{"PTR of letters", ask("x.0.88.127.in-addr.arpa.", dns.TypePTR)},
		{"PTR elsewhere", ask("1.0.0.127.in-addr.arpa.", dns.TypePTR)},
		{"A of a reverse name", ask("2.0.88.127.in-addr.arpa.", dns.TypeA)},
		{"reverse apex SOA", ask("88.127.in-addr.arpa.", dns.TypeSOA)},
		{"reverse apex NS", ask("88.127.in-addr.arpa.", dns.TypeNS)},
		{"PTR of IPv6", ask("2.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.1.0.0.0.0.0.D.F.ip6.arpa.", dns.TypePTR)},
		{"PTR of IPv6 with two digits", ask("22.0.0.0.0.0.0.0.0.1.0.0.0.0.0.d.f.ip6.arpa.", dns.TypePTR)},
		{"PTR of IPv6 on the way", ask("0.0.0.0.0.0.0.0.1.0.0.0.0.0.d.f.ip6.arpa.", dns.TypePTR)},
		{"EDNS", ask("demo.helix.local.", dns.TypeA, edns(4096, true))},
		{"EDNS small", ask("demo.helix.local.", dns.TypeA, edns(1, false))},
		{"EDNS empty answer", ask("demo.helix.local.", dns.TypeAAAA, edns(1232, false))},
		{"EDNS refused", ask("example.com.", dns.TypeA, edns(1232, false))},
		{"EDNS with an option", ask("demo.helix.local.", dns.TypeA, edns(1232, false), func(m *dns.Msg) {
			m.IsEdns0().Option = append(m.IsEdns0().Option, &dns.EDNS0_LOCAL{Code: 65001, Data: []byte("x")})
		})},
		{"EDNS version 1", ask("demo.helix.local.", dns.TypeA, edns(1232, false), func(m *dns.Msg) { m.IsEdns0().SetVersion(1) })},
		{"two OPT", ask("demo.helix.local.", dns.TypeA, edns(1232, false), edns(1232, false))},
		{"OPT with a name", ask("demo.helix.local.", dns.TypeA, edns(1232, false), func(m *dns.Msg) { m.IsEdns0().Hdr.Name = "x." })},
		{"RD and CD come back", ask("demo.helix.local.", dns.TypeA, func(m *dns.Msg) { m.CheckingDisabled, m.AuthenticatedData = true, true })},
		{"RD clear", ask("demo.helix.local.", dns.TypeA, func(m *dns.Msg) { m.RecursionDesired = false })},
		{"opcode NOTIFY", ask("helix.local.", dns.TypeSOA, func(m *dns.Msg) { m.Opcode = dns.OpcodeNotify })},
		{"opcode UPDATE", ask("helix.local.", dns.TypeSOA, func(m *dns.Msg) { m.Opcode = dns.OpcodeUpdate })},
		{"two questions", ask("demo.helix.local.", dns.TypeA, func(m *dns.Msg) { m.Question = append(m.Question, m.Question[0]) })},
		{"no question", ask("demo.helix.local.", dns.TypeA, func(m *dns.Msg) { m.Question = nil })},
	}
	var got strings.Builder
	for _, tt := range tests {
		m := unpack(t, s.answer(nil, tt.msg, udpTransport))
		got.WriteString("# " + tt.name + "\n" + text(m) + "\n")
	}
	golden(t, "answers.golden", got.String())
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("differs from %s; run with -update and look at the difference", path)
	}
}

// TestMalformed: bytes that no library would send.
func TestMalformed(t *testing.T) {
	s := newServer(t)
	good := question(t, "demo.helix.local.", dns.TypeA)
	edit := func(change func(m []byte) []byte) []byte { return change(bytes.Clone(good)) }
	const dropped = -1
	tests := map[string]struct {
		msg  []byte
		want int
	}{
		"nothing":             {nil, dropped},
		"half a header":       {good[:11], dropped},
		"an answer":           {edit(func(m []byte) []byte { m[2] |= 0x80; return m }), dropped},
		"header alone":        {good[:12], dns.RcodeFormatError},
		"name cut":            {good[:17], dns.RcodeFormatError},
		"type cut":            {good[:len(good)-3], dns.RcodeFormatError},
		"label of 64":         {edit(func(m []byte) []byte { m[12] = 64; return m }), dns.RcodeFormatError},
		"pointer to itself":   {edit(func(m []byte) []byte { m[12], m[13] = 0xc0, 12; return m }), dns.RcodeFormatError},
		"name of 300":         {append(append(bytes.Clone(good[:12]), bytes.Repeat([]byte("\x09123456789"), 30)...), 0, 0, 1, 0, 1), dns.RcodeFormatError},
		"additional missing":  {edit(func(m []byte) []byte { m[11] = 1; return m }), dns.RcodeFormatError},
		"answers missing":     {edit(func(m []byte) []byte { m[7] = 9; return m }), dns.RcodeFormatError},
		"opcode 15, cut":      {edit(func(m []byte) []byte { m[2] |= 0x78; return m[:12] }), dns.RcodeNotImplemented},
		"256 questions":       {edit(func(m []byte) []byte { m[4] = 1; m[5] = 0; return m }), dns.RcodeFormatError},
		"bytes behind it":     {append(bytes.Clone(good), 1, 2, 3), dns.RcodeSuccess},
		"truncated set":       {edit(func(m []byte) []byte { m[2] |= 2; return m }), dns.RcodeSuccess},
		"type 0":              {edit(func(m []byte) []byte { m[len(m)-3] = 0; return m }), dns.RcodeSuccess},
		"answer code set":     {edit(func(m []byte) []byte { m[3] |= 5; return m }), dns.RcodeSuccess},
		"OPT as the question": {question(t, "demo.helix.local.", dns.TypeOPT), dns.RcodeSuccess},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			for _, tr := range []transport{udpTransport, tcpTransport} {
				out := s.answer([]byte("xy"), tt.msg, tr)
				if string(out[:2]) != "xy" {
					t.Fatal("what was there before is gone")
				}
				if out = out[2:]; len(out) == 0 {
					if tt.want != dropped {
						t.Errorf("dropped, want rcode %d", tt.want)
					}
					continue
				}
				m := unpack(t, out)
				if m.Rcode != tt.want || !m.Response || m.Id != 1 {
					t.Errorf("got %v", m)
				}
			}
		})
	}
}

func TestFit(t *testing.T) {
	m := new(dns.Msg).SetQuestion("demo.helix.local.", dns.TypeTXT)
	m.SetEdns0(1232, false)
	for range 30 {
		m.Answer = append(m.Answer, &dns.TXT{Hdr: dns.RR_Header{Name: "demo.helix.local.", Rrtype: dns.TypeTXT, Class: dns.ClassINET}, Txt: []string{"some text"}})
	}
	packed, err := fit(m.Copy(), 512)
	if err != nil || len(packed) > 512 {
		t.Fatalf("%d bytes, %v", len(packed), err)
	}
	if got := unpack(t, packed); !got.Truncated || len(got.Answer) != 0 || len(got.Question) != 1 || got.IsEdns0() == nil {
		t.Errorf("got %v", got)
	}
	packed, err = fit(m.Copy(), dns.MaxMsgSize)
	if err != nil || unpack(t, packed).Truncated || len(unpack(t, packed).Answer) != 30 {
		t.Errorf("with room: %v", err)
	}
}

func TestValidate(t *testing.T) {
	ok := Config{Zones: []string{"helix.local"}, Lookup: testHosts}
	if _, err := New(ok); err != nil {
		t.Error(err)
	}
	bad := Config{
		Zones: []string{
			"local", "", "a..b", ".a.b", "a.b.", "A.b", "88.127.in-addr.arpa",
			"x." + strings.Repeat("a", 64), strings.Repeat("abcdefg.", 30) + "x", "dev.test", "dev.test", "sub.dev.test",
		},
		Networks: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/9"), netip.MustParsePrefix("10.0.0.1/8"), netip.MustParsePrefix("fd00::/63"), {}},
	}
	_, err := New(bad)
	if err == nil {
		t.Fatal("accepted")
	}
	for _, want := range []string{
		`zone "local": has one`, `zone "": has one`, `zone "a..b": is not`, `zone ".a.b": is not`, `zone "a.b.": is not`, `zone "A.b": is not`,
		"reverse zone", `aaa": is not made`, "longer than 180", `zone "dev.test": lies`, `zone "sub.dev.test": lies`,
		"10.0.0.0/9", "10.0.0.1/8", "fd00::/63", "invalid Prefix", "lookup: none", "reverse: none",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in:\n%v", want, err)
		}
	}
	if _, err := New(Config{Lookup: testHosts}); err == nil || !strings.Contains(err.Error(), "zones: none") {
		t.Errorf("no zones: %v", err)
	}
}

// FuzzAnswer: no bytes make it panic; what it says unpacks, answers the question
// that was asked, and the short way says what the long way says.
func FuzzAnswer(f *testing.F) {
	s := newServer(f)
	for _, name := range []string{"demo.helix.local.", "a.B.demo.helix.internal.", "helix.local.", ".", "2.0.88.127.in-addr.arpa.", `x\.y\200.demo.helix.local.`, "gw.helix.local."} {
		for _, qtype := range []uint16{dns.TypeA, dns.TypeAAAA, dns.TypeANY, dns.TypePTR, dns.TypeHTTPS, dns.TypeAXFR, dns.TypeSOA} {
			f.Add(question(f, name, qtype))
		}
	}
	m := new(dns.Msg).SetQuestion("demo.helix.local.", dns.TypeA)
	withOPT, err := m.SetEdns0(1232, true).Pack()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(withOPT)
	f.Fuzz(func(t *testing.T, msg []byte) {
		out := s.answer(nil, msg, udpTransport)
		if len(out) == 0 {
			if len(msg) >= headerSize && msg[2]&0x80 == 0 {
				t.Fatalf("no answer to a whole header: %x", msg)
			}
			return
		}
		got := unpack(t, out)
		if !got.Response || len(out) > maxUDPSize || !bytes.Equal(out[:2], msg[:2]) {
			t.Fatalf("not an answer to it: %v", got)
		}
		var query dns.Msg
		if err := query.Unpack(msg); err == nil && len(got.Question) == 1 && got.Question[0] != query.Question[0] {
			t.Fatalf("asked %v, echoed %v", query.Question[0], got.Question[0])
		}
		if plain, ok := s.answerPlain(nil, msg); ok {
			long, _ := s.reply(msg, udpTransport)
			packed, err := long.Pack()
			if err != nil {
				t.Fatal(err)
			}
			if a, b := strings.ToLower(text(unpack(t, plain))), strings.ToLower(text(unpack(t, packed))); a != b {
				t.Fatalf("short way:\n%s\nlong way:\n%s", a, b)
			}
		}
	})
}
