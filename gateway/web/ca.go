package web

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"
)

// How long certificates live. A leaf is renewed after two thirds, so a client
// whose clock runs days ahead still finds it valid; it starts an hour early
// for those behind.
const (
	rootLife    = 10 * 365 * 24 * time.Hour
	leafLife    = 30 * 24 * time.Hour
	leafRenewal = leafLife * 2 / 3
	backdate    = time.Hour
)

// maxLeaves bounds the certificates kept in memory.
const maxLeaves = 4096

// Files of a CA folder. rootKeyFile holds the certificate too, so that one
// rename creates the pair; rootCertFile is the copy that users hand on.
const (
	rootKeyFile  = "root.key"
	rootCertFile = "root.crt"
)

// CA signs the certificates of one installation's names. It is safe for
// concurrent use.
type CA struct {
	dir   string
	zones []string
	now   func() time.Time
	root  *x509.Certificate
	key   *ecdsa.PrivateKey

	mu     sync.Mutex
	leaves map[string]*leaf
}

type leaf struct {
	cert   *tls.Certificate
	issued time.Time
}

// CAError reports a CA folder that cannot be used. It is never repaired by
// making a new CA: the old one may be trusted by machines far away.
type CAError struct {
	Dir string
	Err error
}

// Error says which folder and what is wrong.
func (e *CAError) Error() string {
	return fmt.Sprintf("open certificate authority %s: %v", e.Dir, e.Err)
}

// Unwrap is the cause.
func (e *CAError) Unwrap() error { return e.Err }

// Hint is what a person can do.
func (e *CAError) Hint() string {
	if errors.Is(e.Err, errLooseKey) {
		return "chmod 600 " + filepath.Join(e.Dir, rootKeyFile)
	}
	return "restore " + e.Dir + " from a copy, or move it away to start a new authority (which every client has to trust anew)"
}

var errLooseKey = errors.New("key file can be read by others")

// OpenCA opens the authority in dir, or creates it when dir holds none. The
// root can sign for zones and names below them only; an existing root must
// cover all of zones. now is the clock, nil for the system's.
func OpenCA(dir string, zones []string, now func() time.Time) (*CA, error) {
	if now == nil {
		now = time.Now
	}
	if len(zones) == 0 {
		return nil, &CAError{dir, errors.New("no zone given")}
	}
	ca := &CA{dir: dir, zones: zones, now: now, leaves: map[string]*leaf{}}
	if err := ca.open(); err != nil {
		return nil, &CAError{dir, err}
	}
	return ca, nil
}

func (ca *CA) open() error {
	if err := os.MkdirAll(ca.dir, 0o700); err != nil {
		return err
	}
	pair, err := os.ReadFile(filepath.Join(ca.dir, rootKeyFile))
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Lstat(filepath.Join(ca.dir, rootCertFile)); !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%s is there, but %s is missing", rootCertFile, rootKeyFile)
		}
		pair, err = ca.create()
	}
	if err != nil {
		return err
	}
	if err := ca.load(pair); err != nil {
		return err
	}
	return ca.export()
}

// create makes a root and returns the content of its file.
func (ca *CA) create() ([]byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make root key: %w", err)
	}
	serial, err := newSerial()
	if err != nil {
		return nil, err
	}
	now := ca.now()
	template := &x509.Certificate{
		SerialNumber: serial,
		// The number tells the roots of two installations apart in a trust store.
		Subject:               pkix.Name{Organization: []string{"Helix"}, CommonName: fmt.Sprintf("Helix CA %x", serial.Bytes()[:4])},
		NotBefore:             now.Add(-backdate),
		NotAfter:              now.Add(rootLife),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
		IsCA:                  true,
		MaxPathLenZero:        true,
		// RFC 5280, 4.2.1.10: a constraint binds its own kind of name only, so
		// addresses need one of their own.
		PermittedDNSDomainsCritical: true,
		PermittedDNSDomains:         ca.zones,
		ExcludedIPRanges:            []*net.IPNet{everyAddress(net.IPv4len), everyAddress(net.IPv6len)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("sign root: %w", err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("encode root key: %w", err)
	}
	pair := append(
		pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8})...)
	return pair, writeFile(filepath.Join(ca.dir, rootKeyFile), pair, 0o600)
}

func everyAddress(size int) *net.IPNet {
	return &net.IPNet{IP: make(net.IP, size), Mask: make(net.IPMask, size)}
}

// load checks pair and takes it.
func (ca *CA) load(pair []byte) error {
	info, err := os.Stat(filepath.Join(ca.dir, rootKeyFile))
	if err != nil {
		return err
	}
	if runtime.GOOS != "windows" && info.Mode().Perm()&0o077 != 0 {
		return errLooseKey
	}
	parsed, err := tls.X509KeyPair(pair, pair)
	if err != nil {
		return fmt.Errorf("read %s: %w", rootKeyFile, err)
	}
	key, ok := parsed.PrivateKey.(*ecdsa.PrivateKey)
	root := parsed.Leaf
	if !ok || !root.IsCA || len(parsed.Certificate) != 1 {
		return fmt.Errorf("read %s: not the root of a Helix authority", rootKeyFile)
	}
	if now := ca.now(); now.After(root.NotAfter) {
		return fmt.Errorf("root expired on %s", root.NotAfter.Format(time.DateOnly))
	}
	for _, zone := range ca.zones {
		if !slices.ContainsFunc(root.PermittedDNSDomains, func(d string) bool { return zone == d || strings.HasSuffix(zone, "."+d) }) {
			return fmt.Errorf("root is for %s only, not for %s", strings.Join(root.PermittedDNSDomains, ", "), zone)
		}
	}
	ca.root, ca.key = root, key
	return nil
}

// export writes the certificate beside the key, unless it is there already.
func (ca *CA) export() error {
	path := filepath.Join(ca.dir, rootCertFile)
	have, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return writeFile(path, ca.RootPEM(), 0o644)
	case err != nil:
		return err
	case !bytes.Equal(have, ca.RootPEM()):
		return fmt.Errorf("%s and %s hold different roots", rootCertFile, rootKeyFile)
	}
	return nil
}

// RootPEM is the root certificate, the one thing a client has to trust.
func (ca *CA) RootPEM() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: ca.root.Raw})
}

// RootPath is the file that holds the root certificate.
func (ca *CA) RootPath() string { return filepath.Join(ca.dir, rootCertFile) }

// Certificate is a certificate for exactly the host name given, which must be
// in a zone: from memory while two thirds of its life are not over, else new.
func (ca *CA) Certificate(host string) (*tls.Certificate, error) {
	n, ok := ParseName(host, ca.zones)
	if !ok {
		return nil, fmt.Errorf("certificate for %q: not in %s", host, strings.Join(ca.zones, ", "))
	}
	ca.mu.Lock()
	defer ca.mu.Unlock()
	now := ca.now()
	// A clock set back makes a certificate that is not valid yet: age is
	// judged in both directions.
	if l := ca.leaves[n.Host]; l != nil && now.Sub(l.issued).Abs() < leafRenewal && now.After(l.cert.Leaf.NotBefore) {
		return l.cert, nil
	}
	cert, err := ca.issue(n.Host, now)
	if err != nil {
		return nil, fmt.Errorf("certificate for %q: %w", host, err)
	}
	if len(ca.leaves) >= maxLeaves {
		for name := range ca.leaves { // any one: a lost leaf costs one signature
			delete(ca.leaves, name)
			break
		}
	}
	ca.leaves[n.Host] = &leaf{cert, now}
	return cert, nil
}

func (ca *CA) issue(host string, now time.Time) (*tls.Certificate, error) {
	if now.After(ca.root.NotAfter) {
		return nil, fmt.Errorf("root expired on %s", ca.root.NotAfter.Format(time.DateOnly))
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make key: %w", err)
	}
	serial, err := newSerial()
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber:          serial,
		NotBefore:             now.Add(-backdate),
		NotAfter:              now.Add(leafLife),
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
		DNSNames:              []string{host},
	}
	if len(host) <= 64 { // the upper bound of a common name, RFC 5280 appendix A.1
		template.Subject.CommonName = host
	}
	if template.NotAfter.After(ca.root.NotAfter) {
		template.NotAfter = ca.root.NotAfter
	}
	der, err := x509.CreateCertificate(rand.Reader, template, ca.root, key.Public(), ca.key)
	if err != nil {
		return nil, fmt.Errorf("sign: %w", err)
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("parse what was signed: %w", err)
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: parsed}, nil
}

func newSerial() (*big.Int, error) {
	b := make([]byte, 16)
	if _, err := rand.Read(b); err != nil {
		return nil, fmt.Errorf("make serial number: %w", err)
	}
	b[0] = b[0]&0x7f | 0x40 // positive, and always of the same length
	return new(big.Int).SetBytes(b), nil
}

// writeFile replaces path in one step, after the bytes are on the disk.
func writeFile(path string, data []byte, mode fs.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err = errors.Join(err, f.Chmod(mode), f.Sync(), f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}
