package dnsd

import (
	"net"
	"os/exec"
	"strings"
	"testing"
)

// TestDig asks with the client that people use.
func TestDig(t *testing.T) {
	host, port, err := net.SplitHostPort(serve(t, newServer(t)))
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		args  string
		want  []string
		never string
	}{
		{"+short demo.helix.local", []string{"127.88.0.2\n"}, ""},
		{"+short +tcp x.demo.helix.internal", []string{"127.88.0.2\n"}, ""},
		{"+short both.helix.local AAAA", []string{"fd00::3\n"}, ""},
		{"+short -x 127.88.0.2", []string{"demo.helix.local.\n"}, ""},
		{"DeMo.HeLiX.LoCaL", []string{"status: NOERROR", "flags: qr aa rd;", "DeMo.HeLiX.LoCaL.\t5\tIN\tA\t127.88.0.2", "udp: 1232", "recursion requested but not available"}, "AUTHORITY SECTION"},
		{"demo.helix.local AAAA", []string{"status: NOERROR", "ANSWER: 0", "SOA\tgw.helix.local. hostmaster.helix.local. 1 3600 600 86400 5"}, "ANSWER SECTION"},
		{"demo.helix.local TYPE65", []string{"status: NOERROR", "ANSWER: 0", "SOA"}, "ANSWER SECTION"},
		{"nobody.helix.local", []string{"status: NXDOMAIN", "flags: qr aa rd;", "SOA"}, ""},
		{"+notcp demo.helix.local ANY", []string{"status: NOERROR", "HINFO\t\"RFC8482\" \"\""}, ""},
		{"demo.helix.local ANY", []string{"HINFO", "(TCP)"}, ""}, // dig goes to TCP by itself
		{"helix.local AXFR", []string{"Transfer failed"}, "SOA\t"},
		{"helix.local IXFR=1", []string{"Transfer failed"}, "SOA\t"},
		{"helix.local SOA", []string{"ANSWER: 1", "IN\tSOA\tgw.helix.local."}, ""},
		{"helix.local NS", []string{"IN\tNS\tgw.helix.local."}, ""},
		{"local SOA", []string{"status: REFUSED"}, "SECTION:\nlocal.\t"},
		{"example.com", []string{"status: REFUSED", "flags: qr rd;"}, "SOA"},
		{"CH version.bind TXT", []string{"status: REFUSED"}, ""},
		{"+ednsopt=65001:beef demo.helix.local", []string{"status: NOERROR", "127.88.0.2"}, "65001"},
		{"+cookie=0011223344556677 +dnssec demo.helix.local", []string{"status: NOERROR", "flags: do"}, "COOKIE"},
		{"+edns=1 +noednsneg demo.helix.local", []string{"status: BADVERS", "EDNS: version: 0"}, "127.88.0.2"},
		{"+noedns demo.helix.local", []string{"127.88.0.2"}, "EDNS"},
		{"+opcode=status demo.helix.local", []string{"status: NOTIMP"}, ""},
		{"+header-only", []string{"status: FORMERR"}, ""},
		{"+bufsize=512 +ignore demo.helix.local", []string{"127.88.0.2"}, "tc"},
		{"+tcp +keepopen demo.helix.local gw.helix.local", []string{"127.88.0.2", "127.88.0.1"}, ""},
	}
	for _, tt := range tests {
		t.Run(tt.args, func(t *testing.T) {
			args := append([]string{"@" + host, "-p", port, "+tries=1", "+time=10"}, strings.Fields(tt.args)...)
			out, err := exec.CommandContext(t.Context(), "dig", args...).CombinedOutput()
			if err != nil && !strings.Contains(tt.args, "XFR") {
				t.Fatalf("dig %s: %v\n%s", args, err, out)
			}
			for _, want := range tt.want {
				if !strings.Contains(string(out), want) {
					t.Errorf("%q is not in:\n%s", want, out)
				}
			}
			body := string(out) // without the head line, which repeats the arguments
			if _, after, ok := strings.Cut(body, "global options"); ok {
				body = after
			}
			if tt.never != "" && strings.Contains(body, tt.never) {
				t.Errorf("%q is in:\n%s", tt.never, out)
			}
		})
	}
}
