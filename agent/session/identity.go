package session

import (
	"errors"
	"fmt"
	"strings"
	"time"

	gossh "golang.org/x/crypto/ssh"

	"helix.local/helix/agent/wire"
)

// identity is a wire.Identity ready for use. It is never changed.
type identity struct {
	hostKeys   []gossh.Signer // certificate first, then the plain key
	authorized map[string]struct{}
}

// parseIdentity fails when the host key or its certificate cannot be used. An
// authorized key that cannot be used only locks out its owner: it is skipped
// and its reason returned.
func parseIdentity(id wire.Identity) (parsed *identity, skipped []error, err error) {
	key, err := gossh.ParsePrivateKey([]byte(id.HostKey))
	if err != nil {
		return nil, nil, errors.New("parse ssh host key: not an OpenSSH private key") // the cause may quote the key
	}
	parsed = &identity{authorized: make(map[string]struct{}, len(id.Authorized))}
	if id.HostCert != "" {
		signer, err := certSigner(id.HostCert, key)
		if err != nil {
			return nil, nil, fmt.Errorf("parse ssh host certificate: %w", err)
		}
		parsed.hostKeys = append(parsed.hostKeys, signer)
	}
	parsed.hostKeys = append(parsed.hostKeys, key)
	for i, line := range id.Authorized {
		keys, bad := parseAuthorized(line)
		for _, err := range bad {
			skipped = append(skipped, fmt.Errorf("authorized key %d: %w", i+1, err))
		}
		for _, k := range keys {
			parsed.authorized[string(k.Marshal())] = struct{}{}
		}
	}
	return parsed, skipped, nil
}

func certSigner(line string, key gossh.Signer) (gossh.Signer, error) {
	public, _, _, _, err := gossh.ParseAuthorizedKey([]byte(line))
	if err != nil {
		return nil, err //nolint:wrapcheck // the caller says what was parsed
	}
	cert, ok := public.(*gossh.Certificate)
	if !ok || cert.CertType != gossh.HostCert {
		return nil, errors.New("not a host certificate")
	}
	return gossh.NewCertSigner(cert, key) //nolint:wrapcheck // as above
}

// parseAuthorized reads authorized_keys text, usually one line. A key with
// options (command=, from=, cert-authority...) is turned down: we do not
// enforce them, and letting it in without them would be too much.
func parseAuthorized(text string) (keys []gossh.PublicKey, bad []error) {
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		key, _, options, _, err := gossh.ParseAuthorizedKey([]byte(line))
		switch {
		case err != nil:
			bad = append(bad, err)
		case len(options) > 0:
			bad = append(bad, fmt.Errorf("options are not supported: %s", strings.Join(options, ",")))
		default:
			keys = append(keys, key)
		}
	}
	return keys, bad
}

// allows reports whether key may log in. It depends on nothing else: the key
// that a client showed last need not be the one it logs in with.
func (id *identity) allows(key gossh.PublicKey) bool {
	_, ok := id.authorized[string(key.Marshal())]
	return ok
}

// serverConfig is one connection's.
func (id *identity) serverConfig(ciphers []string, late *time.Timer) *gossh.ServerConfig {
	cfg := &gossh.ServerConfig{
		ServerVersion: serverVersion,
		MaxAuthTries:  authTries,
		AuthLogCallback: func(_ gossh.ConnMetadata, _ string, err error) {
			if err == nil {
				late.Stop()
			}
		},
	}
	cfg.Ciphers = ciphers
	for _, key := range id.hostKeys {
		cfg.AddHostKey(key)
	}
	return cfg
}
