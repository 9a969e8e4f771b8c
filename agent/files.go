package agent

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"helix.local/helix/agent/wire"
)

// within opens the workspace folder and gives the asked path relative to it.
// Whatever symbolic links say, the file calls stay inside (os.Root).
func (t *target) within(r *http.Request) (*os.Root, string, error) {
	path := r.URL.Query().Get("path")
	if filepath.IsAbs(path) {
		rel, err := filepath.Rel(t.boot.Dir, path)
		if err != nil {
			return nil, "", fmt.Errorf("open %q: %w", path, err)
		}
		path = rel
	}
	if path == "" {
		path = "."
	}
	if !filepath.IsLocal(path) {
		return nil, "", fmt.Errorf("open %q: outside of the workspace folder: %w", path, fs.ErrPermission)
	}
	root, err := os.OpenRoot(t.boot.Dir)
	if err != nil {
		return nil, "", fmt.Errorf("open the workspace folder: %w", err)
	}
	return root, path, nil
}

func (t *target) getFile(w http.ResponseWriter, r *http.Request) {
	root, path, err := t.within(r)
	if err != nil {
		t.fail(w, http.StatusInternalServerError, err)
		return
	}
	defer func() { _ = root.Close() }() // read only
	f, err := openPlain(root, path)
	if err != nil {
		t.fail(w, http.StatusBadRequest, err)
		return
	}
	defer func() { _ = f.Close() }() // read only
	info, err := f.Stat()
	if err != nil {
		t.fail(w, http.StatusInternalServerError, err)
		return
	}
	if !info.IsDir() {
		http.ServeContent(w, r, "file.bin", info.ModTime(), f)
		return
	}
	list, err := listFolder(f)
	if err != nil {
		t.fail(w, http.StatusInternalServerError, err)
		return
	}
	t.answer(w, list)
}

// openPlain opens a file or folder. Opening anything else could block for ever.
func openPlain(root *os.Root, path string) (*os.File, error) {
	info, err := root.Stat(path)
	if err != nil {
		return nil, err //nolint:wrapcheck // names the path
	}
	if !info.Mode().IsRegular() && !info.IsDir() {
		return nil, fmt.Errorf("open %q: neither file nor folder", path)
	}
	return root.Open(path) //nolint:wrapcheck // names the path
}

func listFolder(f *os.File) ([]wire.File, error) {
	entries, err := f.ReadDir(-1)
	if err != nil {
		return nil, err //nolint:wrapcheck // names the path
	}
	list := make([]wire.File, 0, len(entries))
	for _, e := range entries {
		info, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) { // removed meanwhile
			continue
		}
		if err != nil {
			return nil, err //nolint:wrapcheck // names the path
		}
		list = append(list, wire.File{
			Name: e.Name(), Size: info.Size(), Mode: fmt.Sprintf("%04o", info.Mode().Perm()),
			Modified: info.ModTime(), Folder: e.IsDir(),
		})
	}
	return list, nil
}

// putFile replaces a file at once: readers see the old one or the new one.
func (t *target) putFile(w http.ResponseWriter, r *http.Request) {
	mode, err := parseMode(r.URL.Query().Get("mode"))
	if err != nil {
		t.fail(w, http.StatusBadRequest, err)
		return
	}
	root, path, err := t.within(r)
	if err != nil {
		t.fail(w, http.StatusInternalServerError, err)
		return
	}
	defer func() { _ = root.Close() }() // nothing is buffered in it
	if err := t.write(root, path, mode, r.Body); err != nil {
		t.fail(w, http.StatusInternalServerError, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

func (t *target) write(root *os.Root, path string, mode fs.FileMode, body io.Reader) (err error) {
	temporary := filepath.Join(filepath.Dir(path), ".helix-"+filepath.Base(path)+".part")
	_ = root.Remove(temporary) // of an upload that was cut
	f, err := root.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return err //nolint:wrapcheck // names the path
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, ignoreNotExist(root.Remove(temporary)))
		}
	}()
	_, err = io.Copy(f, body)
	err = errors.Join(err, f.Chmod(mode)) // whatever the umask
	if !t.owner.Own {
		err = errors.Join(err, f.Chown(int(t.owner.UID), int(t.owner.GID)))
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("write %q: %w", path, err)
	}
	return root.Rename(temporary, path) //nolint:wrapcheck // names the paths
}

func (t *target) deleteFile(w http.ResponseWriter, r *http.Request) {
	root, path, err := t.within(r)
	if err == nil {
		defer func() { _ = root.Close() }() // nothing is buffered in it
		if path == "." {
			err = fmt.Errorf("remove the workspace folder: %w", fs.ErrPermission)
		} else if _, err = root.Lstat(path); err == nil {
			err = root.RemoveAll(path)
		}
	}
	if err != nil {
		t.fail(w, http.StatusInternalServerError, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

func parseMode(text string) (fs.FileMode, error) {
	if text == "" {
		return 0o644, nil
	}
	mode, err := strconv.ParseUint(strings.TrimPrefix(text, "0o"), 8, 9)
	if err != nil {
		return 0, fmt.Errorf("parse mode %q: not permission bits in octal", text)
	}
	return fs.FileMode(mode), nil
}

func ignoreNotExist(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
