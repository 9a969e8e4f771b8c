package sshd

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"
)

func openKeys(t *testing.T, dir string) *Keys {
	t.Helper()
	keys, err := OpenKeys(KeysConfig{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	return keys
}

func hostOf(t *testing.T, keys *Keys, name string, addrs ...netip.Addr) Host {
	t.Helper()
	h, err := keys.Host(name, addrs...)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func certOf(t *testing.T, h Host) *ssh.Certificate {
	t.Helper()
	cert, ok := h.Cert.PublicKey().(*ssh.Certificate)
	if !ok {
		t.Fatalf("host %s has no certificate", h)
	}
	return cert
}

// otherKind is a good private key that is not an ed25519 one.
func otherKind(t *testing.T) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	block, err := ssh.MarshalPrivateKey(key, "")
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(block)
}

func TestKeysStay(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "ssh")
	first, second := openKeys(t, dir), openKeys(t, dir)
	if first.ClientLine() != second.ClientLine() || !bytes.Equal(first.CA().Marshal(), second.CA().Marshal()) {
		t.Error("the installation's keys changed")
	}
	one, two := hostOf(t, first, "alpha"), hostOf(t, second, "alpha")
	if !bytes.Equal(one.PrivatePEM(), two.PrivatePEM()) || len(one.PrivatePEM()) == 0 {
		t.Error("the workspace's key changed")
	}
	if !first.IsClient(second.Client().PublicKey()) || first.IsClient(one.Signer.PublicKey()) {
		t.Error("IsClient is wrong")
	}
	if err := first.Forget("alpha"); err != nil {
		t.Fatal(err)
	}
	if err := first.Forget("alpha"); err != nil {
		t.Errorf("forget twice: %v", err)
	}
	if again := hostOf(t, first, "alpha"); bytes.Equal(again.PrivatePEM(), one.PrivatePEM()) {
		t.Error("a forgotten key came back")
	}
	if other := openKeys(t, t.TempDir()+"/ssh"); other.ClientLine() == first.ClientLine() || bytes.Equal(other.CA().Marshal(), first.CA().Marshal()) {
		t.Error("two installations share a key")
	}
}

func TestKeyFilesAreClosed(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "ssh")
	hostOf(t, openKeys(t, dir), "alpha")
	var names []string
	err := filepath.Walk(dir, func(path string, info os.FileInfo, err error) error {
		if err == nil && modeCounts && info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s has mode %#o", path, info.Mode().Perm())
		}
		if err == nil && !info.IsDir() {
			names = append(names, info.Name())
		}
		return err
	})
	if want := []string{"ca_key", "cli_key", "alpha"}; err != nil || !slices.Equal(names, want) {
		t.Errorf("got files %v, %v, want %v", names, err, want)
	}
}

func TestHostCertificate(t *testing.T) {
	now := time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)
	keys, err := OpenKeys(KeysConfig{Dir: filepath.Join(t.TempDir(), "ssh"), Now: func() time.Time { return now }})
	if err != nil {
		t.Fatal(err)
	}
	addr := netip.MustParseAddr("::ffff:127.88.0.4")
	first := hostOf(t, keys, "alpha", addr)
	cert := certOf(t, first)
	want := []string{"alpha.helix.local", "alpha.helix.internal", "alpha", "127.88.0.4"}
	if !slices.Equal(cert.ValidPrincipals, want) || cert.CertType != ssh.HostCert {
		t.Errorf("got principals %v of type %d, want %v", cert.ValidPrincipals, cert.CertType, want)
	}
	if cert.ValidAfter != uint64(now.Add(-time.Hour).Unix()) || cert.ValidBefore != uint64(now.AddDate(1, 0, 0).Unix()) {
		t.Errorf("valid from %d to %d", cert.ValidAfter, cert.ValidBefore)
	}
	if !strings.HasPrefix(first.CertLine(), ssh.CertAlgoED25519v01+" ") {
		t.Errorf("certificate line %q", first.CertLine())
	}
	serial := func(h Host) uint64 { return certOf(t, h).Serial }
	if got := hostOf(t, keys, "alpha", addr); serial(got) != serial(first) {
		t.Error("a certificate was made without need")
	}
	now = now.Add(certLife * 2 / 3)
	renewed := hostOf(t, keys, "alpha", addr)
	if serial(renewed) == serial(first) {
		t.Error("an old certificate was not renewed")
	}
	moved := hostOf(t, keys, "alpha", netip.MustParseAddr("127.88.0.5"))
	if serial(moved) == serial(renewed) || certOf(t, moved).ValidPrincipals[3] != "127.88.0.5" {
		t.Error("the certificate does not follow the address")
	}
	if !bytes.Equal(moved.Signer.PublicKey().Marshal(), first.Signer.PublicKey().Marshal()) {
		t.Error("the key changed")
	}
	for _, name := range []string{"", "../x", "a.b", "A", "-a", "a-", "*", strings.Repeat("a", 64)} {
		if _, err := keys.Host(name); err == nil {
			t.Errorf("%q was taken for a name", name)
		}
		if err := keys.Forget(name); err == nil {
			t.Errorf("%q was taken for a name to forget", name)
		}
	}
}

func TestClientConfigChecksName(t *testing.T) {
	keys := openKeys(t, filepath.Join(t.TempDir(), "ssh"))
	check := keys.ClientConfig("alpha", "helix").HostKeyCallback
	for name, c := range map[string]struct {
		key ssh.PublicKey
		ok  bool
	}{
		"own":       {hostOf(t, keys, "alpha").Cert.PublicKey(), true},
		"other":     {hostOf(t, keys, "beta").Cert.PublicKey(), false},
		"plain":     {hostOf(t, keys, "alpha").Signer.PublicKey(), false},
		"other CA":  {hostOf(t, openKeys(t, filepath.Join(t.TempDir(), "ssh")), "alpha").Cert.PublicKey(), false},
		"not a key": {keys.CA(), false},
	} {
		if err := check("ignored:1", &net.TCPAddr{}, c.key); (err == nil) != c.ok {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestHostIsSecret(t *testing.T) {
	h := hostOf(t, openKeys(t, filepath.Join(t.TempDir(), "ssh")), "alpha")
	var b bytes.Buffer
	slog.New(slog.NewTextHandler(&b, nil)).Info("x", "host", h)
	for _, text := range []string{fmt.Sprint(h), fmt.Sprintf("%+v", h), fmt.Sprintf("%#v", h)} {
		if text != "alpha" {
			t.Errorf("printed %q", text)
		}
	}
	if !strings.Contains(b.String(), "host=alpha\n") {
		t.Errorf("logged %q", b.String())
	}
}

func TestBrokenKeyIsNotReplaced(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "ssh")
	hostOf(t, openKeys(t, dir), "alpha")
	path := filepath.Join(dir, "ca_key")
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string][]byte{"empty": nil, "cut": good[:len(good)/2], "other kind": otherKind(t), "huge": make([]byte, maxFile+1)} {
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := OpenKeys(KeysConfig{Dir: dir}); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: got %v", name, err)
		}
		if now, _ := os.ReadFile(path); !bytes.Equal(now, text) {
			t.Errorf("%s: the file was changed", name)
		}
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenKeys(KeysConfig{Dir: dir}); err == nil {
		t.Error("a folder was taken for a key")
	}
}

func TestOpenKeyFilesAreRefused(t *testing.T) {
	if !modeCounts {
		return
	}
	dir := filepath.Join(t.TempDir(), "ssh")
	hostOf(t, openKeys(t, dir), "alpha")
	for path, mode := range map[string]os.FileMode{"": 0o777, "ca_key": 0o640, "cli_key": 0o604, "hosts/alpha": 0o644} {
		path = filepath.Join(dir, path)
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		keys, err := OpenKeys(KeysConfig{Dir: dir})
		if err == nil {
			_, err = keys.Host("alpha")
		}
		var h hinter
		if !errors.As(err, &h) || !strings.HasPrefix(h.Hint(), "chmod ") {
			t.Errorf("%s: got %v", path, err)
		}
		if err := os.Chmod(path, info.Mode().Perm()); err != nil {
			t.Fatal(err)
		}
	}
}

func TestWorkspaceOf(t *testing.T) {
	for host, want := range map[string]string{
		"alpha": "alpha", "Alpha.Helix.Local.": "alpha", "alpha.helix.internal": "alpha", "a.b.alpha.helix.local": "alpha",
		"127.88.0.1": "127.88.0.1", "[fd00::1]": "fd00::1", "gw.helix.local": "gw",
		"example.com": "", "": "", "helix.local": "", ".helix.local": "", "a_b": "", "alpha.helix.local.evil": "",
	} {
		if got, ok := workspaceOf(host, defaultZones(nil)); ok != (want != "") || ok && got != want {
			t.Errorf("workspaceOf(%q) = %q, %t, want %q", host, got, ok, want)
		}
	}
}
