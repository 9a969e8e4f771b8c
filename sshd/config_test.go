package sshd

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/crypto/ssh"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != string(want) {
		t.Errorf("%s: got\n%s\nwant\n%s", name, got, want)
	}
}

// fixed are hosts whose key is in testdata.
func fixed(t *testing.T) (ssh.PublicKey, []Host) {
	t.Helper()
	entries, err := ParseEntries([]byte(sample(t, "ed25519.pub")))
	if err != nil {
		t.Fatal(err)
	}
	key := entries[0].Key
	return key, []Host{
		{Name: "alpha", Names: []string{"alpha.helix.local", "alpha.helix.internal", "alpha", "127.88.0.2"}, Signer: public{key: key}},
		{Name: "gw", Names: []string{"gw.helix.local", "gw.helix.internal", "gw", "127.88.0.1"}, Signer: public{key: key}},
	}
}

// public is the half of a signer that a known hosts file needs.
type public struct {
	ssh.Signer
	key ssh.PublicKey
}

func (p public) PublicKey() ssh.PublicKey { return p.key }

func TestClientFilesGolden(t *testing.T) {
	ca, hosts := fixed(t)
	full := ClientConfig{Helix: "/usr/bin/helix", State: "/home/me/state", KnownHosts: "/home/me/known", Identity: "/home/me/key", Hosts: hosts}
	least := ClientConfig{Helix: "/h", State: "/s", KnownHosts: "/k", Zones: []string{"example.test"}, NoPassFD: true}
	odd := ClientConfig{Helix: "/it's/100%/helix", State: `/a "b"\c`, KnownHosts: `/a "b"\c/100%`}
	for name, cfg := range map[string]ClientConfig{"full": full, "least": least, "odd": odd} {
		if runtime.GOOS == "windows" {
			break // the paths are not absolute there
		}
		text, err := cfg.Text()
		if err != nil {
			t.Fatal(err)
		}
		golden(t, name+".golden", text)
	}
	golden(t, "known_hosts.golden", KnownHosts(ca, nil, hosts))
}

func TestClientConfigRefusesPaths(t *testing.T) {
	for _, path := range []string{"", "relative", "/a\nb", "/a${HOME}/b"} {
		if text, err := (ClientConfig{Helix: "/h", State: path, KnownHosts: "/k"}).Text(); err == nil {
			t.Errorf("%q was taken: %s", path, text)
		}
	}
	if change, err := Install(filepath.Join(t.TempDir(), "config"), "/a\nb"); change != ByHand || err == nil {
		t.Errorf("install: %v, %v", change, err)
	}
}

// words splits a line as ssh splits it, and as a POSIX shell splits a line
// without expansions: the two differ in backslashes.
func words(line string, shell bool) []string {
	var out []string
	var word strings.Builder
	var quote byte
	in := false
	for i := 0; i < len(line); i++ {
		c := line[i]
		next := byte(0)
		if i+1 < len(line) {
			next = line[i+1]
		}
		escape := next == '"' || next == '\\' || !shell && (next == '\'' || quote == 0 && next == ' ')
		switch {
		case c == '\\' && escape && (!shell || quote == '"'):
			word.WriteByte(next)
			i++
		case quote == 0 && (c == '\'' || c == '"'):
			quote, in = c, true
		case quote != 0 && c == quote:
			quote = 0
		case quote == 0 && c == ' ':
			if in || word.Len() > 0 {
				out = append(out, word.String())
			}
			word.Reset()
			in = false
		default:
			word.WriteByte(c)
		}
	}
	if quote != 0 {
		return nil // ssh refuses the line
	}
	if in || word.Len() > 0 {
		out = append(out, word.String())
	}
	return out
}

func FuzzQuoting(f *testing.F) {
	for _, path := range []string{"/plain", "/with space", `/q'q"q`, `/100%/h`, `/back\slash\`, "/ünï", `/\'`, `/'\''`, `/$x*[a]?`, "/a#b #c", "/"} {
		f.Add(path)
	}
	f.Fuzz(func(t *testing.T, path string) {
		if checkPath(path) != nil {
			return
		}
		if got := words(configQuote(path), false); len(got) != 1 || got[0] != path {
			t.Errorf("ssh reads %q as %q", path, got)
		}
		if got := words("a "+shellQuote(path)+" b", true); len(got) != 3 || got[1] != path {
			t.Errorf("a shell reads %q as %q", path, got)
		}
		if words("exec "+percent(shellQuote(path))+" b", false) == nil {
			t.Errorf("ssh finds the quotes of %s not balanced", shellQuote(path))
		}
		if strings.ReplaceAll(percent(path), "%%", "%") != path {
			t.Errorf("percent(%q) = %q", path, percent(path))
		}
	})
}

func TestQuotingInRealShell(t *testing.T) {
	for _, path := range []string{"with space", `q'q"q`, `back\slash\`, "ünï", `\'`, `'\''`, `$HOME*[a]?`, "`id`", "!a"} {
		out, err := exec.CommandContext(t.Context(), "sh", "-c", "printf %s "+shellQuote(path)).Output()
		if err != nil || string(out) != path {
			t.Errorf("sh reads %s as %q, %v", shellQuote(path), out, err)
		}
	}
}
