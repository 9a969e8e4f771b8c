package sshd

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"unicode"
)

// Change is what became of a user's ssh configuration.
type Change uint8

// The outcomes of Install and Uninstall.
const (
	Unchanged Change = iota // it was as asked already
	Changed
	ByHand // it could not be changed; the person can do it
)

// errReadOnly is a file whose owner does not want it to be changed.
var errReadOnly = errors.New("the file is read-only")

// bom is what some editors put before the first line.
var bom = []byte("\xef\xbb\xbf")

// IncludeLine is the one line that makes ssh read the generated configuration.
func IncludeLine(generated string) string {
	// The argument is a pattern: what is special in one goes into brackets. Newer
	// versions of ssh expand percent signs here and older ones do not, so that one
	// must be matched by a question mark.
	pattern := strings.NewReplacer("*", "[*]", "?", "[?]", "[", "[[]", "%", "?", `\`, "?").Replace(generated)
	return "Include " + configQuote(pattern)
}

// Install adds the line that includes generated as the first one of the user's
// ssh configuration, and keeps every other byte, the mode, the owner and
// symbolic links. The file and its folder are made when missing. A configuration
// that cannot be changed is no failure of Install: it returns ByHand and the
// reason, and IncludeLine is what a person then adds.
func Install(userConfig, generated string) (Change, error) {
	if err := checkPath(generated); err != nil {
		return ByHand, err
	}
	return edit(userConfig, func(old []byte, missing bool) ([]byte, bool) {
		return addLine(old, IncludeLine(generated), missing), true
	})
}

// Uninstall takes the line of Install away. Every other byte stays as it is; a
// file that Install made, and that holds nothing else, is removed.
func Uninstall(userConfig, generated string) (Change, error) {
	return edit(userConfig, func(old []byte, missing bool) ([]byte, bool) {
		if missing {
			return nil, false
		}
		return removeLine(old, IncludeLine(generated))
	})
}

// addLine returns text with line before everything else, or text itself when it
// has the line. A space at the line's end marks a file that was not there.
func addLine(text []byte, line string, missing bool) []byte {
	if start, _, _ := findLine(text, line); start >= 0 {
		return text
	}
	end := "\n"
	if first := bytes.IndexByte(text, '\n'); first > 0 && text[first-1] == '\r' {
		end = "\r\n"
	}
	if missing {
		end = " \n"
	}
	rest, marked := bytes.CutPrefix(text, bom)
	var out []byte
	if marked {
		out = append(out, bom...)
	}
	out = append(out, line+end...)
	return append(out, rest...)
}

// removeLine returns text without line. It keeps no file that addLine made.
func removeLine(text []byte, line string) (rest []byte, keep bool) {
	start, end, made := findLine(text, line)
	if start < 0 {
		return text, true
	}
	rest = append(bytes.Clone(text[:start]), text[end:]...)
	return rest, !made || len(rest) > 0
}

// findLine returns where line is in text, with its end, or -1.
func findLine(text []byte, line string) (start, end int, made bool) {
	for start < len(text) {
		end = len(text)
		if i := bytes.IndexByte(text[start:], '\n'); i >= 0 {
			end = start + i + 1
		}
		from := start
		if start == 0 && bytes.HasPrefix(text, bom) {
			from = len(bom)
		}
		found := string(text[from:end])
		if strings.TrimRightFunc(found, unicode.IsSpace) == line {
			return from, end, found == line+" \n"
		}
		start = end
	}
	return -1, -1, false
}

// edit replaces the file with what change makes of it; false removes it.
func edit(path string, change func(old []byte, missing bool) ([]byte, bool)) (Change, error) {
	fail := func(err error) (Change, error) {
		return ByHand, &keyError{
			what: "change " + path, err: err,
			hint: "add or remove the Include line by hand, or use the generated file with: ssh -F FILE",
		}
	}
	path, err := follow(path)
	if err != nil {
		return fail(err)
	}
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		text, keep := change(nil, true)
		if !keep {
			return Unchanged, nil
		}
		if err := makeConfig(path, text); err != nil {
			return fail(err)
		}
		return Changed, nil
	}
	if err != nil {
		return fail(err)
	}
	defer func() { _ = f.Close() }() // read side only
	info, err := f.Stat()
	if err != nil {
		return fail(err)
	}
	if !info.Mode().IsRegular() {
		return fail(errors.New("not a regular file"))
	}
	old, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(old) > maxFile {
		err = fmt.Errorf("larger than %d bytes", maxFile)
	}
	if err != nil {
		return fail(err)
	}
	text, keep := change(old, false)
	switch {
	case keep && bytes.Equal(text, old):
		return Unchanged, nil
	case info.Mode().Perm()&0o200 == 0:
		return fail(errReadOnly)
	case !keep:
		err = os.Remove(path)
	default:
		err = overwrite(path, text, info)
	}
	if err != nil {
		return fail(err)
	}
	return Changed, nil
}

// overwrite replaces the file that info describes, with its mode and owner.
func overwrite(path string, text []byte, info fs.FileInfo) error {
	temp, err := writeTemp(path, text, info.Mode())
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(temp) }() // gone already after the rename
	if err := giveTo(temp, info); err != nil {
		return err
	}
	now, err := os.Stat(path)
	if err != nil {
		return err
	}
	if !os.SameFile(now, info) || now.Size() != info.Size() || !now.ModTime().Equal(info.ModTime()) {
		return errors.New("another program is changing the file")
	}
	if err := os.Rename(temp, path); err != nil {
		return err
	}
	return syncFolder(filepath.Dir(path))
}

// makeConfig makes the file and its folder, for whoever owns what they are in.
func makeConfig(path string, text []byte) error {
	folder := filepath.Dir(path)
	above, err := os.Stat(filepath.Dir(folder))
	if err != nil {
		return err
	}
	if err := os.Mkdir(folder, 0o700); err == nil {
		err = giveTo(folder, above)
		if err != nil {
			return err
		}
	} else if !errors.Is(err, fs.ErrExist) {
		return err
	}
	owner, err := os.Stat(folder)
	if err != nil {
		return err
	}
	if err := createFile(path, text); err != nil {
		return err
	}
	return giveTo(path, owner)
}

// follow resolves symbolic links, also to a file that is not there yet.
func follow(path string) (string, error) {
	for range 32 {
		target, err := os.Readlink(path)
		if err != nil {
			info, statErr := os.Lstat(path)
			if errors.Is(statErr, fs.ErrNotExist) || statErr == nil && info.Mode()&fs.ModeSymlink == 0 {
				return path, nil
			}
			return "", err
		}
		if !filepath.IsAbs(target) {
			folder, err := filepath.EvalSymlinks(filepath.Dir(path)) // ".." counts from there
			if err != nil {
				return "", err
			}
			target = filepath.Join(folder, target)
		}
		path = target
	}
	return "", errors.New("too many symbolic links")
}
