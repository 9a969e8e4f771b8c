package gateway

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"helix.local/helix/gateway/api"
)

// A StateError reports a state folder that cannot be used.
type StateError struct {
	Path string
	Err  error
	Cure string
}

// ErrLocked reports that another gateway runs on the state folder.
var ErrLocked = errors.New("a gateway runs here already")

// Code tells a folder that is in use from one that is unfit.
func (e *StateError) Code() api.Code {
	if errors.Is(e.Err, ErrLocked) {
		return api.CodeConflict
	}
	return api.CodeInternal
}

// Error and Unwrap are as usual.
func (e *StateError) Error() string { return fmt.Sprintf("state folder %s: %v", e.Path, e.Err) }
func (e *StateError) Unwrap() error { return e.Err }

// Hint is what to do next.
func (e *StateError) Hint() string { return e.Cure }

// longestSocket is the longest path, in bytes, that a unix socket can have on
// every system we run on (macOS allows 104 with the final zero).
const longestSocket = 103

// prepareState makes the state folder, or checks the one that is there: it
// holds keys, so nobody else may look into it.
func prepareState(path string) error {
	if !filepath.IsAbs(path) {
		return &StateError{path, errors.New("not an absolute path"), "name it from the root"}
	}
	if longest := filepath.Join(path, "links.sock"); len(longest) > longestSocket {
		return &StateError{
			path, fmt.Errorf("the path is too long for a unix socket: %d of %d bytes", len(longest), longestSocket),
			"choose a shorter one with --state",
		}
	}
	if err := os.MkdirAll(path, 0o700); err != nil {
		return &StateError{path, err, "choose a folder of your own with --state"}
	}
	info, err := os.Stat(path)
	if err != nil {
		return &StateError{path, err, ""}
	}
	if !info.IsDir() {
		return &StateError{path, errors.New("not a folder"), "choose another with --state"}
	}
	if mode := info.Mode().Perm(); mode&0o077 != 0 {
		return &StateError{
			path, fmt.Errorf("its mode is %04o: others can look at the keys in it", mode),
			"chmod 700 " + path,
		}
	}
	if owner, ok := ownerOf(info); ok && owner != os.Geteuid() {
		return &StateError{
			path, fmt.Errorf("it belongs to user %d, and this is user %d", owner, os.Geteuid()),
			"run as its owner, or choose another with --state: what it says is run as whoever runs helix up",
		}
	}
	return probeWrite(path)
}

func probeWrite(path string) error {
	f, err := os.CreateTemp(path, ".probe-")
	if err != nil {
		return &StateError{path, err, "it must be writable by the user who runs helix up"}
	}
	return errors.Join(f.Close(), os.Remove(f.Name()))
}

// lockState makes sure that one gateway runs on the state. The lock is the
// kernel's: it ends with the process. The number in the file only names the
// holder in the error.
func lockState(path string) (*os.File, error) {
	name := filepath.Join(path, "lock")
	f, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, &StateError{path, err, ""}
	}
	if err := tryLock(f); err != nil {
		holder, _ := os.ReadFile(name) // without it the message is only less precise
		_ = f.Close()
		return nil, &StateError{
			path, fmt.Errorf("%w%s", ErrLocked, holderText(string(holder))),
			"helix status shows it; another one needs its own --state and --range",
		}
	}
	if err := errors.Join(f.Truncate(0), writeAt(f, strconv.Itoa(os.Getpid()))); err != nil {
		return nil, errors.Join(&StateError{path, err, ""}, f.Close())
	}
	return f, nil
}

func writeAt(f *os.File, text string) error {
	_, err := f.WriteAt([]byte(text), 0)
	return err
}

func holderText(text string) string {
	pid, err := strconv.Atoi(strings.TrimSpace(text))
	if err != nil {
		return ""
	}
	return fmt.Sprintf(" (process %d)", pid)
}

// openKey reads the key that names this gateway to its agents, and makes it
// the first time. A file that cannot be read as one is an error: a new key
// would cut off every agent.
func openKey(path string) (ed25519.PrivateKey, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return newKey(path)
	}
	if err != nil {
		return nil, fmt.Errorf("read gateway key: %w", err)
	}
	block, _ := pem.Decode(text)
	if block == nil {
		return nil, &StateError{path, errors.New("this is not a PEM file"), "restore the file from a backup, or remove it to have a new key made"}
	}
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("read gateway key %s: %w", path, err)
	}
	private, ok := key.(ed25519.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("read gateway key %s: it is a %T, not ed25519", path, key)
	}
	return private, nil
}

func newKey(path string) (ed25519.PrivateKey, error) {
	_, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make gateway key: %w", err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		return nil, fmt.Errorf("make gateway key: %w", err)
	}
	text := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
	if err := writeFile(path, text); err != nil {
		return nil, fmt.Errorf("keep gateway key: %w", err)
	}
	return private, nil
}

// writeFile replaces a file as a whole: a reader, or a crash, sees the old or the new one.
func writeFile(path string, text []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".new-") // mode 0600
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}

// renewFile is writeFile for text that is mostly the same as before.
func renewFile(path string, text []byte) error {
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, text) {
		return nil
	}
	return writeFile(path, text)
}

// path is a path below the state folder.
func (g *Gateway) path(parts ...string) string {
	return filepath.Join(append([]string{g.cfg.State}, parts...)...)
}

func (g *Gateway) publicKey() []byte {
	return g.key.Public().(ed25519.PublicKey)
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
