package sshd

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func sample(t testing.TB, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestParseEntries(t *testing.T) {
	good := sample(t, "ed25519.pub")
	for name, c := range map[string]struct{ text, comment, fault string }{
		"ed25519":       {text: good, comment: "me@laptop"},
		"ecdsa":         {text: "# mine\r\n\n  " + sample(t, "ecdsa.pub"), comment: "two words"},
		"rsa":           {text: sample(t, "rsa.pub"), comment: "test"},
		"hardware":      {text: "sk-ssh-ed25519@openssh.com AAAAGnNrLXNzaC1lZDI1NTE5QG9wZW5zc2guY29tAAAAIAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gAAAABHNzaDo="},
		"nothing":       {text: "\n# no key\n", fault: "there is none"},
		"private":       {text: string(otherKind(t)), fault: "private key"},
		"short RSA":     {text: sample(t, "rsa1024.pub"), fault: "RSA key of 1024 bits"},
		"DSA":           {text: sample(t, "dsa.pub"), fault: "DSA"},
		"certificate":   {text: sample(t, "cert.pub"), fault: "certificate"},
		"options":       {text: `command="id" ` + good, fault: "options are not supported"},
		"garbage":       {text: "hello world", fault: "does not begin with a key type"},
		"type only":     {text: "ssh-ed25519", fault: "the key is missing"},
		"not base64":    {text: "ssh-ed25519 !!!", fault: "damaged"},
		"cut":           {text: good[:40], fault: "damaged"},
		"other type":    {text: "ssh-rsa" + strings.TrimPrefix(good, "ssh-ed25519"), fault: "the key says ssh-ed25519"},
		"control":       {text: strings.TrimSpace(good) + "\x1b[31m", fault: "control character"},
		"one bad of 2":  {text: good + "x y\n", fault: "line 2"},
		"binary":        {text: "\x00\xff", fault: "control character"},
		"only a prefix": {text: "ssh-", fault: "the key is missing"},
	} {
		entries, err := ParseEntries([]byte(c.text))
		var h hinter
		switch {
		case c.fault == "" && (err != nil || len(entries) != 1 || entries[0].Comment != c.comment):
			t.Errorf("%s: got %v, %v", name, entries, err)
		case c.fault != "" && (err == nil || !strings.Contains(err.Error(), c.fault) || !errors.As(err, &h) || h.Hint() == ""):
			t.Errorf("%s: got %v, want %q and a hint", name, err, c.fault)
		}
	}
}

func TestAuthorized(t *testing.T) {
	path := filepath.Join(t.TempDir(), "authorized_keys")
	a := NewAuthorized(path)
	if list, err := a.List(); list != nil || err != nil {
		t.Errorf("no file: %v, %v", list, err)
	}
	ed, rsa, ecdsa := sample(t, "ed25519.pub"), sample(t, "rsa.pub"), sample(t, "ecdsa.pub")
	for i, want := range []int{2, 0} {
		if added, err := a.Add(ed + rsa + ed); err != nil || len(added) != want {
			t.Errorf("add %d: %v, %v", i, added, err)
		}
	}
	if _, err := a.Add(ecdsa + "garbage"); err == nil {
		t.Error("garbage was added")
	}
	if added, err := a.AddFile("testdata/ecdsa.pub"); err != nil || len(added) != 1 {
		t.Errorf("add file: %v, %v", added, err)
	}
	private := filepath.Join(t.TempDir(), "id_ecdsa")
	if err := os.WriteFile(private, otherKind(t), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{private, "testdata/none"} {
		if _, err := a.AddFile(file); err == nil || !strings.Contains(err.Error(), file) {
			t.Errorf("add %s: %v", file, err)
		}
	}
	if info, err := os.Stat(path); err != nil || modeCounts && info.Mode().Perm() != 0o600 {
		t.Errorf("file: %v, %v", info.Mode(), err)
	}
	list, err := a.List()
	if err != nil || len(list) != 3 || list[0].Type() != "ssh-ed25519" || list[2].Comment != "two words" {
		t.Fatalf("list: %v, %v", list, err)
	}
	for _, e := range list {
		if !a.Allowed(e.Key) {
			t.Errorf("%s is not allowed", e.Fingerprint())
		}
	}
	removals := []struct {
		which string
		ok    bool
	}{
		{"nobody", false},
		{"", false},
		{"SHA256:", false},
		{list[0].Fingerprint()[:9], false}, // two characters
		{list[0].Fingerprint()[:17], true},
		{list[0].Fingerprint(), false}, // gone
		{strings.TrimPrefix(list[1].Fingerprint(), "SHA256:"), true},
		{"two words", true},
	}
	for _, r := range removals {
		if gone, err := a.Remove(r.which); (err == nil) != r.ok || err != nil && !errors.Is(err, ErrNoKey) || err == nil && a.Allowed(gone.Key) {
			t.Errorf("remove %q: %v, %v", r.which, gone, err)
		}
	}
	if text, err := os.ReadFile(path); len(text) != 0 || err != nil {
		t.Errorf("left over: %q, %v", text, err)
	}
}

func TestAuthorizedFileEditedByHand(t *testing.T) {
	path := filepath.Join(t.TempDir(), "authorized_keys")
	ed, rsa := sample(t, "ed25519.pub"), sample(t, "rsa.pub")
	hand := "# my keys\nfrom=\"10.0.0.1\" " + rsa + ed + strings.Replace(sample(t, "ecdsa.pub"), "two words", "me@laptop", 1)
	if err := os.WriteFile(path, []byte(hand), 0o600); err != nil {
		t.Fatal(err)
	}
	a := NewAuthorized(path)
	list, err := a.List()
	if len(list) != 2 || err == nil || !strings.Contains(err.Error(), "line 2") {
		t.Errorf("list: %v, %v", list, err)
	}
	keys, err := ParseEntries([]byte(rsa))
	if err != nil || a.Allowed(keys[0].Key) {
		t.Error("a key with options is allowed without them")
	}
	if _, err := a.Remove("me@laptop"); err == nil || !strings.Contains(err.Error(), "2 keys") {
		t.Errorf("ambiguous: %v", err)
	}
	if _, err := a.Remove(list[0].Fingerprint()); err != nil {
		t.Error(err)
	}
	if text, err := os.ReadFile(path); string(text) != strings.Replace(hand, ed, "", 1) || err != nil {
		t.Errorf("got %q, %v", text, err)
	}
	if !modeCounts {
		return
	}
	if err := os.Chmod(path, 0o666); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Add(ed); err == nil || a.Allowed(list[1].Key) {
		t.Errorf("a file that everybody can write counts: %v", err)
	}
	if _, err := a.Remove("me@laptop"); err == nil {
		t.Error("a file that everybody can write was changed")
	}
}

func TestOffer(t *testing.T) {
	home := t.TempDir()
	a := NewAuthorized(filepath.Join(t.TempDir(), "authorized_keys"))
	if added, err := a.Offer(home); added != nil || err != nil {
		t.Errorf("no keys: %v, %v", added, err)
	}
	if err := os.Mkdir(filepath.Join(home, ".ssh"), 0o700); err != nil {
		t.Fatal(err)
	}
	for name, from := range map[string]string{"id_ed25519.pub": "ed25519.pub", "id_ecdsa.pub": "rsa1024.pub", "id_rsa.pub": "rsa.pub", "other.pub": "ecdsa.pub"} {
		if err := os.WriteFile(filepath.Join(home, ".ssh", name), []byte(sample(t, from)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	added, err := a.Offer(home)
	if len(added) != 2 || err == nil || !strings.Contains(err.Error(), "id_ecdsa.pub") {
		t.Errorf("got %v, %v", added, err)
	}
	if _, err := a.Remove(added[0].Fingerprint()); err != nil {
		t.Fatal(err)
	}
	if again, err := a.Offer(home); again != nil || err != nil || a.Allowed(added[0].Key) {
		t.Errorf("a removed key came back: %v, %v", again, err)
	}
}

func FuzzParseEntries(f *testing.F) {
	for _, name := range []string{"ed25519.pub", "ecdsa.pub", "rsa.pub", "dsa.pub", "cert.pub", "rsa1024.pub"} {
		f.Add([]byte(sample(f, name)))
	}
	f.Add([]byte("# c\n\nssh-ed25519 AAAA x"))
	f.Fuzz(func(t *testing.T, text []byte) {
		entries, err := ParseEntries(text)
		if err != nil {
			return
		}
		for _, e := range entries {
			again, err := ParseEntries([]byte(e.Line()))
			if err != nil || len(again) != 1 || again[0].Comment != e.Comment || !bytes.Equal(again[0].Key.Marshal(), e.Key.Marshal()) {
				t.Errorf("%q does not survive: %v, %v", e.Line(), again, err)
			}
		}
	})
}
