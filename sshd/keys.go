package sshd

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"
)

// How long a host certificate is good, how far it reaches back for clients
// whose clock is late, and how much must be left of it when it is handed out.
const (
	certLife  = 365 * 24 * time.Hour
	certBack  = time.Hour
	certRenew = certLife / 3
)

// KeysConfig says where an installation keeps its keys.
type KeysConfig struct {
	Dir   string           // the folder "ssh" of the state folder; made with mode 0700
	Zones []string         // none: helix.local and helix.internal
	Now   func() time.Time // nil: time.Now
}

// Keys are the keys of one installation: the host CA, one host key a name, and
// the key the command line logs in with. Its methods may be called
// concurrently.
type Keys struct {
	cfg    KeysConfig
	ca     ssh.Signer
	client ssh.Signer

	mu    sync.Mutex
	hosts map[string]Host // by name; guarded by mu
}

// OpenKeys opens the keys in the folder and makes those that are missing. A
// file that is broken, or that others may read, is an error with a hint.
func OpenKeys(cfg KeysConfig) (*Keys, error) {
	cfg.Zones = defaultZones(cfg.Zones)
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if err := os.MkdirAll(filepath.Join(cfg.Dir, "hosts"), 0o700); err != nil {
		return nil, fmt.Errorf("make key folder: %w", err)
	}
	info, err := os.Stat(cfg.Dir)
	if err != nil {
		return nil, fmt.Errorf("open key folder: %w", err)
	}
	if modeCounts && info.Mode().Perm()&0o022 != 0 {
		return nil, &keyError{
			what: "open key folder " + cfg.Dir,
			err:  fmt.Errorf("mode %#o: other users can write to it", info.Mode().Perm()),
			hint: "chmod 700 " + shellQuote(cfg.Dir),
		}
	}
	ca, err := openKey(filepath.Join(cfg.Dir, "ca_key"), "helix host CA")
	if err != nil {
		return nil, err
	}
	client, err := openKey(filepath.Join(cfg.Dir, "cli_key"), "helix command line")
	if err != nil {
		return nil, err
	}
	return &Keys{cfg: cfg, ca: ca.signer, client: client.signer, hosts: map[string]Host{}}, nil
}

// CA is the public key that signs the host certificates.
func (k *Keys) CA() ssh.PublicKey { return k.ca.PublicKey() }

// Client is the key that the command line logs in with. It is not among the
// authorized users' keys: who owns the state folder is let in with it always.
func (k *Keys) Client() ssh.Signer { return k.client }

// ClientPath is the file of the private key of Client.
func (k *Keys) ClientPath() string { return filepath.Join(k.cfg.Dir, "cli_key") }

// ClientLine is the public key of Client as a line of authorized_keys, without
// its end.
func (k *Keys) ClientLine() string { return keyLine(k.client.PublicKey(), "helix command line") }

// IsClient reports whether key is the one of Client.
func (k *Keys) IsClient(key ssh.PublicKey) bool {
	return bytes.Equal(key.Marshal(), k.client.PublicKey().Marshal())
}

// Host is the identity of one name: a key, and a certificate of the CA over the
// same key. It prints as its name only.
type Host struct {
	Name   string
	Names  []string   // what clients may call it: the certificate's principals
	Signer ssh.Signer // the plain key, for clients without certificates
	Cert   ssh.Signer // the same key with its certificate

	private []byte
}

// PrivatePEM is the private key in OpenSSH's format. It is a secret.
func (h Host) PrivatePEM() []byte { return bytes.Clone(h.private) }

// CertLine is the certificate as a line of a host certificate file, without
// its end.
func (h Host) CertLine() string { return keyLine(h.Cert.PublicKey(), h.Name) }

// String hides the key.
func (h Host) String() string { return h.Name }

// GoString hides the key.
func (h Host) GoString() string { return h.Name }

// LogValue hides the key.
func (h Host) LogValue() slog.Value { return slog.StringValue(h.Name) }

// Host returns the identity of a workspace, or of the gateway for GatewayName,
// and makes its key at the first call. The certificate names name, name in each
// zone, and addrs, never a pattern, so that no host can pass for another one. It
// lives in memory, is good from one hour ago for one year, and is made anew when
// less than a third of that is left or addrs differ from the last call's.
func (k *Keys) Host(name string, addrs ...netip.Addr) (Host, error) {
	if !isLabel(name) {
		return Host{}, fmt.Errorf("host key of %q: not a workspace name", name)
	}
	names := make([]string, 0, len(k.cfg.Zones)+1+len(addrs))
	for _, zone := range k.cfg.Zones {
		names = append(names, name+"."+zone)
	}
	names = append(names, name)
	for _, addr := range addrs {
		names = append(names, addr.Unmap().String())
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	host, ok := k.hosts[name]
	if ok && slices.Equal(host.Names, names) && k.fresh(host) {
		return host, nil
	}
	if !ok {
		key, err := openKey(k.hostPath(name), name+"."+k.cfg.Zones[0])
		if err != nil {
			return Host{}, err
		}
		host = Host{Name: name, Signer: key.signer, private: key.pem}
	}
	host.Names = names
	cert, err := k.certify(host)
	if err != nil {
		return Host{}, fmt.Errorf("certify host key of %q: %w", name, err)
	}
	host.Cert = cert
	k.hosts[name] = host
	return host, nil
}

// Forget removes the key of a workspace that is gone. A later workspace of that
// name has another key. It is no error when there is none.
func (k *Keys) Forget(name string) error {
	if !isLabel(name) {
		return fmt.Errorf("forget host key of %q: not a workspace name", name)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.hosts, name)
	if err := os.Remove(k.hostPath(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("forget host key: %w", err)
	}
	return nil
}

func (k *Keys) hostPath(name string) string { return filepath.Join(k.cfg.Dir, "hosts", name) }

func (k *Keys) fresh(h Host) bool {
	cert, ok := h.Cert.PublicKey().(*ssh.Certificate)
	return ok && k.cfg.Now().Add(certRenew).Before(time.Unix(int64(cert.ValidBefore), 0))
}

// certify signs the key of h for its names.
func (k *Keys) certify(h Host) (ssh.Signer, error) {
	var serial [8]byte
	_, _ = rand.Read(serial[:]) // never fails, see crypto/rand
	now := k.cfg.Now()
	cert := &ssh.Certificate{
		Key:             h.Signer.PublicKey(),
		Serial:          binary.BigEndian.Uint64(serial[:]),
		CertType:        ssh.HostCert,
		KeyId:           "helix host " + h.Name,
		ValidPrincipals: h.Names,
		ValidAfter:      uint64(now.Add(-certBack).Unix()),
		ValidBefore:     uint64(now.Add(certLife).Unix()),
	}
	if err := cert.SignCert(rand.Reader, k.ca); err != nil {
		return nil, err
	}
	return ssh.NewCertSigner(cert, h.Signer)
}

// keyLine writes key as a line without its end.
func keyLine(key ssh.PublicKey, comment string) string {
	line := strings.TrimSuffix(string(ssh.MarshalAuthorizedKey(key)), "\n")
	if comment != "" {
		line += " " + comment
	}
	return line
}
