package sshd

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const generated = "/state/ssh/config"

func TestInstallKeepsEveryByte(t *testing.T) {
	line := IncludeLine(generated)
	for name, c := range map[string]struct{ before, during string }{
		"plain":            {"Host a\n  User b\n", line + "\nHost a\n  User b\n"},
		"no final newline": {"Host a", line + "\nHost a"},
		"CRLF":             {"Host a\r\n  User b\r\n", line + "\r\nHost a\r\n  User b\r\n"},
		"empty":            {"", line + "\n"},
		"mark":             {"\xef\xbb\xbfHost a\n", "\xef\xbb\xbf" + line + "\nHost a\n"},
		"other install":    {"Include \"/other\"\n", line + "\nInclude \"/other\"\n"},
		"there already":    {"Host a\n\n" + line + "\r\nHost b", "Host a\n\n" + line + "\r\nHost b"},
		"not UTF-8":        {"# \xff\x00\n", line + "\n# \xff\x00\n"},
	} {
		path := filepath.Join(t.TempDir(), "config")
		if err := os.WriteFile(path, []byte(c.before), 0o640); err != nil {
			t.Fatal(err)
		}
		want := Changed
		for range 2 {
			if c.before == c.during {
				want = Unchanged
			}
			if change, err := Install(path, generated); change != want || err != nil {
				t.Errorf("%s: install: %v, %v", name, change, err)
			}
			want = Unchanged
		}
		if got, err := os.ReadFile(path); string(got) != c.during || err != nil {
			t.Errorf("%s: got %q, %v, want %q", name, got, err, c.during)
		}
		info, err := os.Stat(path)
		if err != nil || modeCounts && info.Mode().Perm() != 0o640 {
			t.Errorf("%s: mode %v, %v", name, info.Mode(), err)
		}
		if c.before == c.during {
			continue
		}
		for _, want := range []Change{Changed, Unchanged} {
			if change, err := Uninstall(path, generated); change != want || err != nil {
				t.Errorf("%s: uninstall: %v, %v", name, change, err)
			}
		}
		if got, err := os.ReadFile(path); string(got) != c.before || err != nil {
			t.Errorf("%s: got %q back, %v, want %q", name, got, err, c.before)
		}
	}
}

func TestInstallMakesFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), ".ssh", "config")
	if change, err := Uninstall(path, generated); change != Unchanged || err != nil {
		t.Errorf("uninstall of nothing: %v, %v", change, err)
	}
	if change, err := Install(path, generated); change != Changed || err != nil {
		t.Fatalf("install: %v, %v", change, err)
	}
	if change, err := Install(path, generated); change != Unchanged || err != nil {
		t.Errorf("install again: %v, %v", change, err)
	}
	if text, err := os.ReadFile(path); strings.TrimSpace(string(text)) != IncludeLine(generated) || err != nil {
		t.Errorf("got %q, %v", text, err)
	}
	if change, err := Uninstall(path, generated); change != Changed || err != nil {
		t.Errorf("uninstall: %v, %v", change, err)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file is still there: %v", err)
	}
}

func TestInstallFollowsLinks(t *testing.T) {
	dir := t.TempDir()
	for _, folder := range []string{"home", "dotfiles/deep"} {
		if err := os.MkdirAll(filepath.Join(dir, folder), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	link := func(target, path string) {
		t.Helper()
		if err := os.Symlink(target, filepath.Join(dir, path)); err != nil {
			t.Fatal(err)
		}
	}
	link("../dotfiles/deep", "home/.ssh")
	link("../real", "dotfiles/deep/config") // from the real folder: dotfiles/real
	for range 2 {                           // not there yet, then there
		path := filepath.Join(dir, "home/.ssh/config")
		if change, err := Install(path, generated); change != Changed || err != nil {
			t.Fatalf("install: %v, %v", change, err)
		}
		if info, err := os.Lstat(path); err != nil || info.Mode()&os.ModeSymlink == 0 {
			t.Errorf("the link is gone: %v", err)
		}
		if _, err := os.Stat(filepath.Join(dir, "dotfiles/real")); err != nil {
			t.Error(err)
		}
		if change, err := Uninstall(path, generated); change != Changed || err != nil {
			t.Errorf("uninstall: %v, %v", change, err)
		}
		if err := os.WriteFile(filepath.Join(dir, "dotfiles/real"), []byte("Host a\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	link("loop", "loop")
	if change, err := Install(filepath.Join(dir, "loop"), generated); change != ByHand || err == nil {
		t.Errorf("loop: %v, %v", change, err)
	}
}

func TestInstallGivesUp(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string, mode os.FileMode) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), mode); err != nil {
			t.Fatal(err)
		}
	}
	write("readonly", "Host a\n", 0o400)
	write("huge", strings.Repeat("#", maxFile+1), 0o600)
	write("file", "", 0o600)
	for _, path := range []string{"readonly", "huge", ".", "no/folder/config", "file/config"} {
		change, err := Install(filepath.Join(dir, path), generated)
		var h hinter
		if change != ByHand || !errors.As(err, &h) || !strings.Contains(h.Hint(), "by hand") {
			t.Errorf("%s: got %v, %v", path, change, err)
		}
	}
	if text, err := os.ReadFile(filepath.Join(dir, "readonly")); string(text) != "Host a\n" || err != nil {
		t.Errorf("the read-only file: %q, %v", text, err)
	}
	left, err := filepath.Glob(filepath.Join(dir, ".*"))
	if len(left) > 0 || err != nil {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func FuzzInstall(f *testing.F) {
	for _, text := range []string{"", "\n", "Host a", "Host a\r\n", "\xef\xbb\xbf", "\xef\xbb\xbf\r\n", IncludeLine(generated), "\r\n" + IncludeLine(generated) + " \n", "Include \"/x\" \n"} {
		f.Add([]byte(text))
	}
	line := IncludeLine(generated)
	f.Fuzz(func(t *testing.T, text []byte) {
		before := bytes.Clone(text)
		during := addLine(text, line, false)
		if !bytes.Equal(before, text) || !bytes.Equal(addLine(during, line, false), during) {
			t.Errorf("%q: a second line was added", before)
		}
		if start, _, _ := findLine(text, line); start >= 0 {
			return // it was there, and it is the user's
		}
		if after, keep := removeLine(during, line); !keep || !bytes.Equal(after, before) {
			t.Errorf("%q came back as %q, %t", before, after, keep)
		}
	})
}
