//go:build linux || darwin

package session

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// tree makes files with odd names, modes, symlinks, a large and an empty one.
func tree(t *testing.T, dir string) {
	t.Helper()
	for name, size := range map[string]int{"plain": 10, "empty": 0, "with space": 70_000, "quote'\"": 1, "ümläut": 5, "-dash": 3, "sub/deep/file": 100, "large": 20 << 20} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		write(t, path, string(randomBytes(t, size)))
	}
	if err := os.Chmod(filepath.Join(dir, "plain"), 0o751); err != nil { //nolint:gosec // a mode to be copied
		t.Fatal(err)
	}
	if err := os.Symlink("sub/deep", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
}

func same(t *testing.T, a, b string) {
	t.Helper()
	run(t, "diff", "-r", "--no-dereference", a, b)
	for _, dir := range []string{a, b} {
		info, err := os.Stat(filepath.Join(dir, "plain"))
		if err != nil || info.Mode().Perm() != 0o751 {
			t.Errorf("mode in %s: %v, %v", dir, info.Mode(), err)
		}
	}
}

// Each way to copy a tree, there and back.
func TestCopies(t *testing.T) {
	t.Parallel()
	tg := startTarget(t, own(t))
	source := t.TempDir()
	tree(t, source)
	ssh := fmt.Sprintf("ssh -F %s", tg.file("config"))
	ways := map[string]func(from, to string) []string{
		"rsync": func(from, to string) []string { return []string{"rsync", "-a", "-e", ssh, from + "/", to} },
	}
	for name, copy := range ways {
		t.Run(name, func(t *testing.T) {
			there, back := filepath.Join(tg.home, name), filepath.Join(t.TempDir(), "back")
			args := copy(source, "ws:"+there)
			run(t, args[0], args[1:]...)
			args = copy("ws:"+there, back)
			run(t, args[0], args[1:]...)
			same(t, source, there)
			same(t, source, back)
		})
	}
	for name, flags := range map[string][]string{"scp": {"-rpq"}, "scp -O": {"-O", "-rpq"}} {
		t.Run(name, func(t *testing.T) {
			there, back := filepath.Join(tg.home, "scp"+flags[0]), filepath.Join(t.TempDir(), "back")
			if err := os.Remove(filepath.Join(source, "link")); err != nil && !os.IsNotExist(err) {
				t.Fatal(err) // scp follows links, so that copies could not be equal
			}
			for _, ends := range [][2]string{{source, "ws:" + there}, {"ws:" + there, back}} {
				if out, err := tg.command("scp", append(flags, ends[0], ends[1])...).CombinedOutput(); err != nil {
					t.Fatalf("%v: %s", err, out)
				}
			}
			same(t, source, there)
			same(t, source, back)
		})
	}
}

func TestSFTP(t *testing.T) {
	t.Parallel()
	tg := startTarget(t, own(t))
	data := string(randomBytes(t, 5<<20))
	write(t, tg.file("data"), data)
	script := strings.Join([]string{
		"put " + tg.file("data") + " there", "mkdir d", "rename there d/moved", "ln -s moved d/link", "chmod 640 d/moved",
		"get d/moved " + tg.file("back"), "ls -l d", "-rm none", "pwd", "df",
	}, "\n")
	out, stderr, code := result(t, tg.command("sftp", "-b", "-", "ws"), script+"\n")
	if code != 0 {
		t.Fatalf("code %d\n%s%s", code, out, stderr)
	}
	if read(t, tg.file("back")) != data || read(t, filepath.Join(tg.home, "d/moved")) != data {
		t.Error("copies differ")
	}
	if info, err := os.Stat(filepath.Join(tg.home, "d/moved")); err != nil || info.Mode().Perm() != 0o640 {
		t.Errorf("mode: %v, %v", info, err)
	}
	if !strings.Contains(out, "Remote working directory: "+tg.home) {
		t.Errorf("starts elsewhere: %s", out)
	}
}
