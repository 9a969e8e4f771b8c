package sshd

import (
	"bytes"
	"crypto/rsa"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"unicode"

	"golang.org/x/crypto/ssh"
)

// ErrNoKey reports that no authorized key is the one that was asked for.
var ErrNoKey = errors.New("no such key")

// minRSABits is the shortest RSA key that is taken, as in OpenSSH 9.
const minRSABits = 2048

// Entry is one public key that may log in.
type Entry struct {
	Key     ssh.PublicKey
	Comment string
}

// Type is the key's algorithm name, such as "ssh-ed25519".
func (e Entry) Type() string { return e.Key.Type() }

// Fingerprint is the key's SHA-256 fingerprint as OpenSSH writes it.
func (e Entry) Fingerprint() string { return ssh.FingerprintSHA256(e.Key) }

// Line is the entry as a line of authorized_keys, without its end.
func (e Entry) Line() string { return keyLine(e.Key, e.Comment) }

// ParseEntries reads text in the format of authorized_keys. Empty lines and
// comments are passed over; everything else must be a public key that may be
// used: no options, no private key, no certificate, no DSA, no RSA key below
// 2048 bits.
func ParseEntries(text []byte) ([]Entry, error) {
	if bytes.Contains(text, []byte("PRIVATE KEY-----")) {
		return nil, &keyError{
			what: "read public key", err: errors.New("this is a private key"),
			hint: "give the file that ends in .pub; a private key never leaves its place",
		}
	}
	var entries []Entry
	for n, line := range strings.Split(string(text), "\n") {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		entry, err := parseEntry(line)
		if err != nil {
			return nil, &keyError{
				what: fmt.Sprintf("read public key in line %d", n+1), err: err,
				hint: "a line is: TYPE KEY COMMENT, as in the .pub file that ssh-keygen writes",
			}
		}
		entries = append(entries, entry)
	}
	if len(entries) == 0 {
		return nil, &keyError{
			what: "read public key", err: errors.New("there is none"),
			hint: "make one with: ssh-keygen -t ed25519",
		}
	}
	return entries, nil
}

func parseEntry(line string) (Entry, error) {
	if strings.ContainsFunc(line, func(r rune) bool { return r != '\t' && unicode.IsControl(r) }) {
		return Entry{}, errors.New("control character")
	}
	fields := strings.Fields(line)
	if len(fields) == 0 {
		return Entry{}, errors.New("empty line")
	}
	switch kind := fields[0]; {
	case kind == "ssh-dss":
		return Entry{}, errors.New("DSA keys are too weak")
	case strings.Contains(kind, "-cert-v01@"):
		return Entry{}, errors.New("this is a certificate, not a key")
	case !strings.HasPrefix(kind, "ssh-") && !strings.HasPrefix(kind, "ecdsa-") && !strings.HasPrefix(kind, "sk-"):
		return Entry{}, errors.New("it does not begin with a key type; options are not supported")
	case len(fields) < 2:
		return Entry{}, errors.New("the key is missing")
	}
	blob, err := base64.StdEncoding.DecodeString(fields[1])
	if err != nil {
		return Entry{}, fmt.Errorf("the key is damaged: %w", err)
	}
	key, err := ssh.ParsePublicKey(blob)
	if err != nil {
		return Entry{}, fmt.Errorf("the key is damaged: %w", err)
	}
	if key.Type() != fields[0] {
		return Entry{}, fmt.Errorf("the line says %s, the key says %s", fields[0], key.Type())
	}
	if holder, ok := key.(ssh.CryptoPublicKey); ok {
		if public, ok := holder.CryptoPublicKey().(*rsa.PublicKey); ok && public.N.BitLen() < minRSABits {
			return Entry{}, fmt.Errorf("RSA key of %d bits, less than %d", public.N.BitLen(), minRSABits)
		}
	}
	return Entry{Key: key, Comment: strings.Join(fields[2:], " ")}, nil
}

// Authorized is the file of the keys that may log in. It is read at each call,
// so an edit by hand counts at once. Its methods may be called concurrently.
type Authorized struct {
	path string
	mu   sync.Mutex // held while the file is rewritten
}

// NewAuthorized returns the store in the file at path, which need not exist.
func NewAuthorized(path string) *Authorized { return &Authorized{path: path} }

// List returns the keys in the order of the file. A line that is no usable key
// does not hide the others: they are returned together with the error.
func (a *Authorized) List() ([]Entry, error) {
	entries, faults, err := a.read()
	return entries, errors.Join(err, faults)
}

// read returns the keys, what is wrong with single lines, and the error that
// kept it from reading the file at all.
func (a *Authorized) read() (entries []Entry, bad, err error) {
	text, err := readChecked(a.path, 0o022, "other users can write to it")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, err
	}
	var faults []error
	for n, line := range strings.Split(string(text), "\n") {
		if line = strings.TrimSpace(line); line == "" || line[0] == '#' {
			continue
		}
		entry, err := parseEntry(line)
		if err != nil {
			faults = append(faults, fmt.Errorf("%s line %d: %w", a.path, n+1, err))
			continue
		}
		entries = append(entries, entry)
	}
	return entries, errors.Join(faults...), nil
}

// Allowed reports whether key may log in. A file that cannot be read allows
// nobody.
func (a *Authorized) Allowed(key ssh.PublicKey) bool {
	entries, _ := a.List() // what is readable counts; List tells the rest to who asks
	want := key.Marshal()
	return slices.ContainsFunc(entries, func(e Entry) bool { return bytes.Equal(e.Key.Marshal(), want) })
}

// Offer adds the default public keys in the ".ssh" folder of home when there is
// no file of authorized keys yet, so that a key which was removed later does not
// come back. It returns what it added; no key at all is not an error.
func (a *Authorized) Offer(home string) ([]Entry, error) {
	if _, err := os.Lstat(a.path); !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var found []Entry
	var faults []error
	for _, name := range []string{"id_ed25519", "id_ed25519_sk", "id_ecdsa", "id_ecdsa_sk", "id_rsa"} {
		path := filepath.Join(home, ".ssh", name+".pub")
		entries, err := readEntries(path)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			faults = append(faults, fmt.Errorf("default key %s: %w", path, err))
		}
		found = append(found, entries...)
	}
	if len(found) == 0 {
		return nil, errors.Join(faults...)
	}
	added, err := a.add(found)
	return added, errors.Join(append(faults, err)...)
}

// Add adds every key in text. All are added or none. Those that are there
// already are left alone and not returned.
func (a *Authorized) Add(text string) ([]Entry, error) {
	entries, err := ParseEntries([]byte(text))
	if err != nil {
		return nil, err
	}
	return a.add(entries)
}

// AddFile adds the keys in the file at path, as Add does.
func (a *Authorized) AddFile(path string) ([]Entry, error) {
	entries, err := readEntries(path)
	if err != nil {
		return nil, fmt.Errorf("add keys of %s: %w", path, err)
	}
	return a.add(entries)
}

// Remove removes the one key that which names: by its fingerprint, by a prefix
// of that (with or without "SHA256:", at least four characters), or by its whole
// comment.
func (a *Authorized) Remove(which string) (Entry, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	entries, _, err := a.read()
	if err != nil {
		return Entry{}, err
	}
	var found []Entry
	prefix := strings.TrimPrefix(which, "SHA256:")
	for _, e := range entries {
		short := strings.TrimPrefix(e.Fingerprint(), "SHA256:")
		if e.Comment == which && which != "" || len(prefix) >= 4 && strings.HasPrefix(short, prefix) {
			found = append(found, e)
		}
	}
	switch {
	case len(found) == 0:
		return Entry{}, &keyError{what: fmt.Sprintf("remove key %q", which), err: ErrNoKey, hint: "list the keys with: helix key ls"}
	case len(found) > 1:
		return Entry{}, &keyError{
			what: fmt.Sprintf("remove key %q", which), err: fmt.Errorf("%d keys are named so", len(found)),
			hint: "give more of the fingerprint, for example " + found[0].Fingerprint(),
		}
	}
	gone := found[0].Key.Marshal()
	return found[0], a.rewriteLocked(func(lines []string) []string {
		return slices.DeleteFunc(lines, func(line string) bool {
			e, err := parseEntry(line)
			return err == nil && bytes.Equal(e.Key.Marshal(), gone)
		})
	})
}

func (a *Authorized) add(entries []Entry) ([]Entry, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	known, _, err := a.read()
	if err != nil {
		return nil, err
	}
	var added []Entry
	for _, e := range entries {
		same := func(o Entry) bool { return bytes.Equal(o.Key.Marshal(), e.Key.Marshal()) }
		if !slices.ContainsFunc(known, same) && !slices.ContainsFunc(added, same) {
			added = append(added, e)
		}
	}
	if len(added) == 0 {
		return nil, nil
	}
	return added, a.rewriteLocked(func(lines []string) []string {
		for _, e := range added {
			lines = append(lines, e.Line())
		}
		return lines
	})
}

// rewriteLocked replaces the lines of the file; lines that are not keys stay as
// they are. It needs mu.
func (a *Authorized) rewriteLocked(change func([]string) []string) error {
	text, err := os.ReadFile(a.path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("change authorized keys: %w", err)
	}
	var lines []string
	if body := strings.TrimSuffix(string(text), "\n"); body != "" {
		lines = strings.Split(body, "\n")
	}
	var out strings.Builder
	for _, line := range change(lines) {
		out.WriteString(line + "\n")
	}
	if err := replaceFile(a.path, []byte(out.String()), 0o600); err != nil {
		return fmt.Errorf("change authorized keys: %w", err)
	}
	return nil
}

func readEntries(path string) ([]Entry, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	return ParseEntries(text)
}
