package web

import (
	"bytes"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestCACertificatesAreValidNowAndDaysAhead(t *testing.T) {
	now := time.Now()
	ca, err := OpenCA(filepath.Join(t.TempDir(), "ca"), testZones, func() time.Time { return now })
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca.RootPEM())
	for _, host := range []string{"demo.helix.local", "a.b.demo.helix.internal", strings.Repeat("x", 63) + ".demo.helix.local"} {
		cert, err := ca.Certificate(host)
		if err != nil {
			t.Fatal(err)
		}
		for _, at := range []time.Duration{-30 * time.Minute, 0, 3 * 24 * time.Hour, 29 * 24 * time.Hour} {
			opts := x509.VerifyOptions{DNSName: host, Roots: roots, CurrentTime: now.Add(at), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
			if _, err := cert.Leaf.Verify(opts); err != nil {
				t.Errorf("%s at %+v: %v", host, at, err)
			}
		}
		if err := cert.Leaf.VerifyHostname("other.helix.local"); err == nil {
			t.Errorf("%s is valid for another name", host)
		}
	}
	if _, err := ca.Certificate("example.com"); err == nil {
		t.Error("a foreign name got a certificate")
	}
}

// The name constraints bind whoever steals the key: a leaf signed for a name
// outside of the zones is turned down by clients.
func TestCARootCannotVouchForOthers(t *testing.T) {
	ca, err := OpenCA(filepath.Join(t.TempDir(), "ca"), testZones, nil)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca.RootPEM())
	for _, host := range []string{"example.com", "helix.local.example.com", "xhelix.local"} {
		cert, err := ca.issue(host, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		_, err = cert.Leaf.Verify(x509.VerifyOptions{DNSName: host, Roots: roots})
		if bad, ok := errors.AsType[x509.CertificateInvalidError](err); !ok || bad.Reason != x509.CANotAuthorizedForThisName {
			t.Errorf("%s: got %v, want a name constraint violation", host, err)
		}
	}
}

func TestCARenewsAfterTwoThirds(t *testing.T) {
	now := time.Now()
	ca, err := OpenCA(filepath.Join(t.TempDir(), "ca"), testZones, func() time.Time { return now })
	if err != nil {
		t.Fatal(err)
	}
	serial := func() string {
		c, err := ca.Certificate("demo.helix.local")
		if err != nil {
			t.Fatal(err)
		}
		return c.Leaf.SerialNumber.String()
	}
	first := serial()
	now = now.Add(leafRenewal - time.Minute)
	if serial() != first {
		t.Error("renewed too early")
	}
	now = now.Add(2 * time.Minute)
	second := serial()
	if second == first {
		t.Error("not renewed after two thirds")
	}
	now = now.Add(-30 * 24 * time.Hour)
	if serial() == second {
		t.Error("clock set back: a certificate of the future is still used")
	}
	for i := range maxLeaves - len(ca.leaves) {
		ca.leaves[fmt.Sprintf("w%d.helix.local", i)] = ca.leaves["demo.helix.local"]
	}
	if _, err := ca.Certificate("one-more.helix.local"); err != nil {
		t.Fatal(err)
	}
	if len(ca.leaves) > maxLeaves {
		t.Errorf("%d certificates are kept, want at most %d", len(ca.leaves), maxLeaves)
	}
	now = now.Add(2 * rootLife)
	if _, err := ca.Certificate("demo.helix.local"); err == nil {
		t.Error("an expired root signed")
	}
}

func TestCAReopens(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "ca")
	first, err := OpenCA(dir, testZones, nil)
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(filepath.Join(dir, rootKeyFile))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("key file: %v, %v", info, err)
	}
	// The copy for users may be lost; the pair is in the key file.
	if err := os.Remove(first.RootPath()); err != nil {
		t.Fatal(err)
	}
	second, err := OpenCA(dir, []string{"helix.local", "lab.helix.internal"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	copied, err := os.ReadFile(second.RootPath())
	if err != nil || !bytes.Equal(copied, first.RootPEM()) {
		t.Fatalf("root changed: %v", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 2 {
		t.Fatalf("got %v, %v, want two files", entries, err)
	}
}

func TestCABrokenFilesAreErrorsAndStay(t *testing.T) {
	write := func(name, text string) func(*testing.T, string) {
		return func(t *testing.T, dir string) {
			t.Helper()
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	other, err := OpenCA(filepath.Join(t.TempDir(), "other"), testZones, nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		spoil func(*testing.T, string)
		zones []string
		now   func() time.Time
		want  string
		hint  string
	}{
		"key is garbage":  {spoil: write(rootKeyFile, "garbage"), want: "read root.key", hint: "restore"},
		"key is empty":    {spoil: write(rootKeyFile, ""), want: "read root.key", hint: "restore"},
		"cert is another": {spoil: write(rootCertFile, string(other.RootPEM())), want: "different roots", hint: "restore"},
		"key is missing": {spoil: func(t *testing.T, dir string) {
			t.Helper()
			if err := os.Remove(filepath.Join(dir, rootKeyFile)); err != nil {
				t.Fatal(err)
			}
		}, want: "root.key is missing", hint: "restore"},
		"key is open to all": {spoil: func(t *testing.T, dir string) {
			t.Helper()
			if err := os.Chmod(filepath.Join(dir, rootKeyFile), 0o644); err != nil {
				t.Fatal(err)
			}
		}, want: "read by others", hint: "chmod 600"},
		"another zone": {zones: []string{"corp.example"}, want: "not for corp.example", hint: "move it away"},
		"no zone":      {zones: []string{}, want: "no zone"},
		"expired":      {now: func() time.Time { return time.Now().Add(11 * 365 * 24 * time.Hour) }, want: "expired", hint: "move it away"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "ca")
			if _, err := OpenCA(dir, testZones, nil); err != nil {
				t.Fatal(err)
			}
			if c.spoil != nil {
				c.spoil(t, dir)
			}
			if c.zones == nil {
				c.zones = testZones
			}
			before := folder(t, dir)
			_, err := OpenCA(dir, c.zones, c.now)
			bad, ok := errors.AsType[*CAError](err)
			if !ok || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), dir) {
				t.Fatalf("got %v, want %q", err, c.want)
			}
			if !strings.Contains(bad.Hint(), c.hint) || bad.Unwrap() == nil {
				t.Errorf("got hint %q, want %q", bad.Hint(), c.hint)
			}
			if after := folder(t, dir); after != before {
				t.Errorf("the folder was changed:\n%s\n%s", before, after)
			}
		})
	}
	if _, err := OpenCA("/dev/null/ca", testZones, nil); err == nil {
		t.Error("a CA in a file")
	}
}

// folder is the content of all files of dir.
func folder(t *testing.T, dir string) string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var all strings.Builder
	for _, e := range entries {
		data, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&all, "%s %q\n", e.Name(), data)
	}
	return all.String()
}
