package sshd

import (
	"crypto/ed25519"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/crypto/ssh"
)

// maxFile bounds what is read of any key or configuration file, in bytes.
const maxFile = 1 << 20

// keyPair is one private key as it is on disk and as it signs.
type keyPair struct {
	signer ssh.Signer
	pem    []byte
}

// openKey reads the key at path and makes it when there is none. A key that is
// there but cannot be used is an error: a new one in its place would change an
// identity that clients rely on.
func openKey(path, comment string) (keyPair, error) {
	key, err := readKey(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return key, err
	}
	_, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		return keyPair{}, fmt.Errorf("make key %s: %w", path, err)
	}
	block, err := ssh.MarshalPrivateKey(private, comment)
	if err != nil {
		return keyPair{}, fmt.Errorf("make key %s: %w", path, err)
	}
	err = createFile(path, pem.EncodeToMemory(block))
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return keyPair{}, fmt.Errorf("make key %s: %w", path, err)
	}
	return readKey(path) // another process may have been first: its key counts
}

func readKey(path string) (keyPair, error) {
	text, err := readPrivate(path)
	if err != nil {
		return keyPair{}, err
	}
	broken := func(err error) (keyPair, error) {
		return keyPair{}, &keyError{
			what: "read key " + path, err: err,
			hint: "put the file back from a copy; or remove it, and a new key is made that clients will not know",
		}
	}
	private, err := ssh.ParseRawPrivateKey(text)
	if err != nil {
		return broken(err)
	}
	if _, ok := private.(*ed25519.PrivateKey); !ok {
		return broken(fmt.Errorf("%T is not an ed25519 key", private))
	}
	signer, err := ssh.NewSignerFromKey(private)
	if err != nil {
		return broken(err)
	}
	return keyPair{signer: signer, pem: text}, nil
}

// readPrivate reads a file that nobody but its owner may read.
func readPrivate(path string) ([]byte, error) {
	return readChecked(path, 0o077, "other users can read it")
}

// readChecked reads the regular file at path and refuses one that has a
// permission bit of forbidden.
func readChecked(path string, forbidden fs.FileMode, why string) (text []byte, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read key file: %w", err)
	}
	defer func() { _ = f.Close() }() // read side only
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("read key file: %w", err)
	}
	if !info.Mode().IsRegular() {
		return nil, &keyError{what: "read key " + path, err: errors.New("not a regular file"), hint: "move it away"}
	}
	if modeCounts && info.Mode().Perm()&forbidden != 0 {
		return nil, &keyError{
			what: "read key " + path, err: fmt.Errorf("mode %#o: %s", info.Mode().Perm(), why),
			hint: "chmod 600 " + shellQuote(path),
		}
	}
	text, err = io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, fmt.Errorf("read key file: %w", err)
	}
	if len(text) > maxFile {
		return nil, fmt.Errorf("read key file %s: larger than %d bytes", path, maxFile)
	}
	return text, nil
}

// createFile writes a new file of mode 0600 that is seen whole or not at all.
// It fails with fs.ErrExist when path is there.
func createFile(path string, text []byte) error {
	temp, err := writeTemp(path, text, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(temp) }() // gone already after the rename below
	err = os.Link(temp, path)
	if err != nil && !errors.Is(err, fs.ErrExist) {
		// Some file systems have no links. Two first starts at once are kept apart by
		// the lock of the state folder.
		if _, statErr := os.Lstat(path); errors.Is(statErr, fs.ErrNotExist) {
			err = os.Rename(temp, path)
		}
	}
	if err != nil {
		return err
	}
	return syncFolder(filepath.Dir(path))
}

// replaceFile writes path anew, seen whole or not at all.
func replaceFile(path string, text []byte, mode fs.FileMode) error {
	temp, err := writeTemp(path, text, mode)
	if err != nil {
		return err
	}
	if err := os.Rename(temp, path); err != nil {
		_ = os.Remove(temp) // the first error says more
		return err
	}
	return syncFolder(filepath.Dir(path))
}

func writeTemp(path string, text []byte, mode fs.FileMode) (name string, err error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return "", err
	}
	_, err = f.Write(text)
	err = errors.Join(err, f.Chmod(mode.Perm()), f.Sync(), f.Close())
	if err != nil {
		_ = os.Remove(f.Name()) // the first error says more
		return "", err
	}
	return f.Name(), nil
}
