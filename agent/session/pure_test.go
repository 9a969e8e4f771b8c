//go:build linux || darwin

package session

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"

	gossh "golang.org/x/crypto/ssh"
	"golang.org/x/sys/unix"
)

func ownerOf(info os.FileInfo) uint32 { return info.Sys().(*syscall.Stat_t).Uid }

func TestEnvRules(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]bool{
		"LANG": true, "LC_ALL": true, "GIT_PROTOCOL": true, "COLORTERM": true, "MY_VAR1": true, "lower": true,
		"": false, "1X": false, "A B": false, "A=B": false, "LD_PRELOAD": false, "ld_preload": false, "LD_LIBRARY_PATH": false,
		"DYLD_INSERT_LIBRARIES": false, "PATH": false, "HOME": false, "BASH_ENV": false, "ENV": false, "IFS": false,
		"SSH_AUTH_SOCK": false, "HELIX_ADDR": false, "TERM": false, "BASH_FUNC_x%%": false,
	} {
		if got := envAllowed(name); got != want {
			t.Errorf("envAllowed(%q) = %v", name, got)
		}
	}
	var e environment
	if e.set("A", "x\x00y") || e.set("A", strings.Repeat("x", maxEnvBytes)) {
		t.Error("bad value accepted")
	}
	for range maxEnvNames {
		e.set("A", "x")
	}
	if e.set("A", "x") {
		t.Error("no bound on the number of variables")
	}
	if got := merge([]string{"A=1", "B=2", "=x", "none"}, []string{"A=3"}); !reflect.DeepEqual(got, []string{"A=3", "B=2"}) {
		t.Errorf("merge: %q", got)
	}
}

func TestAccounts(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, filepath.Join(dir, "passwd"), "root:x:0:0::/root:/bin/bash\nbad line\nbad:x:a:0::/:/x\n# c\nhelix:x:1000:1001:Helix,,,:/home/helix:/bin/ash\nbare:x:5:5:::\n")
	write(t, filepath.Join(dir, "group"), "root:x:0:\nkvm:x:77:other,helix\nbad:x:q:helix\nwheel:x:78:helix\n")
	got, err := Lookup(dir, "helix")
	want := Account{Name: "helix", UID: 1000, GID: 1001, Groups: []uint32{77, 78}, Home: "/home/helix", Shell: "/bin/ash", Own: os.Geteuid() == 1000}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, %v", got, err)
	}
	if a, err := LookupID(dir, 5); err != nil || a.Home != "/" || a.Shell != "/bin/sh" {
		t.Errorf("defaults: %+v, %v", a, err)
	}
	for _, err := range []error{second(Lookup(dir, "bad")), second(LookupID(dir, 9)), second(Lookup(dir+"/none", "x")), second(LookupID(dir+"/none", 0))} {
		if err == nil {
			t.Error("found an account that is not there")
		}
	}
}

func second(_ Account, err error) error { return err }

func TestModes(t *testing.T) {
	t.Parallel()
	term := &unix.Termios{Lflag: unix.ECHO | unix.ISIG, Iflag: unix.ICRNL}
	applyModes(term, parseModes([]byte{53, 0, 0, 0, 0, 51, 0, 0, 0, 1, 1, 0, 0, 0, 7, 2, 0, 0, 0, 255, 91, 0, 0, 0, 1, 128, 0, 0, 150, 0, 0, 36, 0, 0, 0, 0}))
	if term.Lflag != unix.ISIG|unix.ICANON || term.Cc[unix.VINTR] != 7 || term.Cc[unix.VQUIT] != 0 || term.Cflag&unix.CSIZE != unix.CS8 || term.Iflag != unix.ICRNL {
		t.Errorf("got %+v", term) // the list ends at opcode 0, before ICRNL
	}
}

func TestCiphers(t *testing.T) {
	t.Parallel()
	if got := ciphersFor("SSH-2.0-OpenSSH_9.2p1", true); len(got) != 2 || got[0] != gossh.CipherAES128GCM {
		t.Errorf("OpenSSH with AES: %v", got)
	}
	if got := append(ciphersFor("SSH-2.0-OpenSSH_9.2p1", false), ciphersFor("SSH-2.0-paramiko_2", true)...); got != nil {
		t.Errorf("others: %v", got)
	}
}

func FuzzPTYPayload(f *testing.F) {
	f.Add(gossh.Marshal(&ptyPayload{"xterm", 80, 24, 0, 0, "\x35\x00\x00\x00\x01\x00"}))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		term, err := parsePTY(b)
		if err != nil {
			return
		}
		if strings.ContainsRune(term.term, 0) || len(term.modes) > len(b)/5 {
			t.Errorf("accepted %+v", term)
		}
		applyModes(new(unix.Termios), term.modes)
		again, err := parsePTY(gossh.Marshal(&ptyPayload{term.term, term.size.Columns, term.size.Rows, term.size.Width, term.size.Height, encodeModes(term.modes)}))
		if err != nil || !reflect.DeepEqual(again, term) {
			t.Errorf("round trip: %+v, %v; want %+v", again, err, term)
		}
	})
}

func encodeModes(modes []mode) string {
	var b []byte
	for _, m := range modes {
		b = append(b, m.op, byte(m.value>>24), byte(m.value>>16), byte(m.value>>8), byte(m.value))
	}
	return string(b)
}

func FuzzAuthorizedKeys(f *testing.F) {
	f.Add("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIBq8bVyxwGWpXyR8EQtdTGmi7XYDrDoLLNW7YQAaZ4Sl me\n# note\n")
	f.Add(`command="x",no-pty ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIBq8bVyxwGWpXyR8EQtdTGmi7XYDrDoLLNW7YQAaZ4Sl`)
	f.Fuzz(func(t *testing.T, text string) {
		keys, _ := parseAuthorized(text)
		for _, key := range keys {
			again, bad := parseAuthorized(string(gossh.MarshalAuthorizedKey(key)))
			if len(bad) > 0 || len(again) != 1 || string(again[0].Marshal()) != string(key.Marshal()) {
				t.Errorf("key does not survive a round trip: %v", bad)
			}
		}
	})
}

func FuzzPasswd(f *testing.F) {
	f.Add("helix:x:1000:1001:Helix,,,:/home/helix:/bin/ash\n", "kvm:x:77:other,helix\n")
	f.Fuzz(func(t *testing.T, passwd, group string) {
		parsePasswd(passwd, func(a Account) bool {
			if a.Name == "" || a.Home == "" || a.Shell == "" || strings.Contains(a.Name, ":") {
				t.Errorf("incomplete account %+v", a)
			}
			parseGroups(group, a.Name)
			return false
		})
	})
}
