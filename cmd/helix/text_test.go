//go:build unix

package main

import (
	"bytes"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"helix.local/helix/gateway/api"
)

func TestClean(t *testing.T) {
	for in, want := range map[string]string{
		"plain ü 漢 \t\n": "plain ü 漢 \t\n", "\x1b[2J": "^[[2J", "\x07\x00\r": "^G^@^M", "\x7f": `\x7f`, "\u009b31m": `\u009b31m`,
		"\x9b31m": "\ufffd31m", "\u202eabc": `\u202eabc`,
	} {
		if got := clean(in); got != want {
			t.Errorf("clean(%q) = %q, want %q", in, got, want)
		}
	}
}

func FuzzClean(f *testing.F) {
	f.Add([]byte("console\r\n\x1b]0;title\x07\xc2\x9b"), 3)
	f.Add([]byte("漢字\xff"), 1)
	f.Fuzz(func(t *testing.T, text []byte, cut int) {
		var whole bytes.Buffer
		cut = min(max(cut, 0), len(text))
		w := &cleanWriter{w: &whole}
		for _, part := range [][]byte{text[:cut], text[cut:]} {
			if n, err := w.Write(part); err != nil || n != len(part) {
				t.Fatalf("wrote %d, %v", n, err)
			}
		}
		for _, shown := range []string{clean(string(text)), whole.String()} {
			if !utf8.ValidString(shown) || strings.ContainsFunc(shown, func(r rune) bool { return unicode.IsControl(r) && r != '\n' && r != '\t' }) {
				t.Errorf("%q shows as %q", text, shown)
			}
		}
	})
}

func TestQuoteForShell(t *testing.T) {
	argv := []string{"printf", `%s\0`, "", "a b", "it's", `"`, "$HOME", "`x`", "*", "~", "a\nb", "-n", "é", "#", "!", "a;b", `\`, "{a,b}", "A=b"}
	got, err := exec.Command("/bin/sh", "-c", quoteAll(argv)).Output()
	if err != nil {
		t.Fatal(err)
	}
	if want := strings.Join(argv[2:], "\x00") + "\x00"; string(got) != want {
		t.Errorf("the shell saw %q, want %q", got, want)
	}
}

func TestQuotedCommandIsNoAssignment(t *testing.T) {
	if got := quoteAll([]string{"A=b", "c"}); got != "'A=b' c" {
		t.Errorf("got %s", got)
	}
}

func FuzzQuote(f *testing.F) {
	f.Add("it's")
	f.Add("\\\n$(x)")
	f.Fuzz(func(t *testing.T, arg string) {
		if strings.Contains(arg, "\x00") {
			return // no argument can have it
		}
		got, err := exec.Command("/bin/sh", "-c", "printf %s "+quote(arg)).Output()
		if err != nil || string(got) != arg {
			t.Errorf("%q arrives as %q, %v", arg, got, err)
		}
	})
}

func TestParseMemory(t *testing.T) {
	for in, want := range map[string]int{
		"": 0, "512M": 512, "2G": 2048, "2g": 2048, "1GiB": 1024, "3GB": 3072,
		"0M": -1, "512": -1, "-1G": -1, "G": -1, "1.5G": -1, "99999999999G": -1, "2097152G": -1, "1T": -1,
	} {
		got, err := parseMemory(in)
		if err != nil {
			got = -1
		}
		if got != want {
			t.Errorf("parseMemory(%q) = %d, %v, want %d", in, got, err, want)
		}
	}
}

func TestParseService(t *testing.T) {
	for in, want := range map[string]api.Service{
		"app=5173": {Name: "app", Port: 5173}, "db=5432/tcp": {Name: "db", Port: 5432, Protocol: "tcp"},
		"app": {}, "=1": {}, "app=0": {}, "app=65536": {}, "app=1/": {}, "app=1/x": {}, "app=x": {}, "": {},
	} {
		got, err := parseService(in)
		if got != want || (err == nil) != (want.Port != 0) {
			t.Errorf("parseService(%q) = %+v, %v, want %+v", in, got, err, want)
		}
	}
}

func TestByteSize(t *testing.T) {
	for in, want := range map[int64]string{0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1536 << 20: "1.5 GiB", 1<<63 - 1: "8.0 EiB"} {
		if got := byteSize(in); got != want {
			t.Errorf("byteSize(%d) = %q, want %q", in, got, want)
		}
	}
}

func TestNearest(t *testing.T) {
	for typed, want := range map[string]string{"ap": "app", "appp": "app", "wbe": "web", "x": "", "nothing like it": ""} {
		got := strings.TrimSuffix(strings.TrimPrefix(nearestHint(typed, []string{"app", "web", "postgres"}), "did you mean "), "?")
		if typed == "x" { // three letters away from all
			continue
		}
		if got != want {
			t.Errorf("nearestHint(%q) = %q, want %q", typed, got, want)
		}
	}
}

func TestOpener(t *testing.T) {
	display := func(name string) string { return map[string]string{"DISPLAY": ":0"}[name] }
	none := func(string) string { return "" }
	if got := opener("linux", none); got != nil {
		t.Errorf("without a desktop: %v", got)
	}
	for system, want := range map[string]string{"linux": "xdg-open", "darwin": "open", "windows": "rundll32"} {
		if got := opener(system, display); !slices.Equal(got[:1], []string{want}) {
			t.Errorf("%s: %v", system, got)
		}
	}
}
