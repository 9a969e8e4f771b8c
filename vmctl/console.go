package vmctl

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync"
)

// tailLines is how much of a console is kept in memory for error messages.
const (
	tailLines = 12
	tailBytes = 8 << 10
)

// console writes what a guest prints to a file that never grows beyond its
// limits: the file is renamed PATH.1, PATH.1 becomes PATH.2, and so on.
type console struct {
	path   string
	limits LogLimits

	mu   sync.Mutex // guards what follows
	file *os.File
	size int64
	tail []byte
}

// openConsole starts a new log. That of the start before becomes PATH.1.
func openConsole(path string, limits LogLimits) (*console, error) {
	c := &console{path: path, limits: limits}
	if info, err := os.Stat(path); err == nil && info.Size() > 0 {
		if err := c.shift(); err != nil {
			return nil, err
		}
	}
	if err := c.open(); err != nil {
		return nil, err
	}
	return c, nil
}

func (c *console) open() error {
	f, err := os.OpenFile(c.path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return fmt.Errorf("open console log: %w", err)
	}
	c.file, c.size = f, 0
	return nil
}

// shift makes room for a new file.
func (c *console) shift() error {
	for i := c.limits.Keep; i > 0; i-- {
		from := c.path
		if i > 1 {
			from = fmt.Sprintf("%s.%d", c.path, i-1)
		}
		if err := os.Rename(from, fmt.Sprintf("%s.%d", c.path, i)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("rotate console log: %w", err)
		}
	}
	return nil
}

// Write never fails: a guest must not stop because the host's disk is full. What
// cannot be written is still in the tail.
func (c *console) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tail = append(c.tail, p...)
	if over := len(c.tail) - tailBytes; over > 0 {
		c.tail = slices.Delete(c.tail, 0, over)
	}
	if c.file == nil {
		return len(p), nil
	}
	if c.size+int64(len(p)) > c.limits.Bytes {
		_ = c.file.Close() // complete, or not to be helped
		c.file = nil
		if c.shift() != nil || c.open() != nil {
			return len(p), nil
		}
	}
	n, _ := c.file.Write(p) // see above
	c.size += int64(n)
	return len(p), nil
}

// Lines returns the last lines, oldest first.
func (c *console) Lines() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return lastLines(c.tail)
}

// panicked returns the line in which the guest's kernel said why it gave up, or "".
func (c *console) panicked() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	for line := range bytes.Lines(c.tail) {
		if i := bytes.Index(line, []byte("Kernel panic")); i >= 0 {
			return strings.TrimSpace(string(line[i:]))
		}
	}
	return ""
}

// Close closes the file; the tail can still be read.
func (c *console) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.file == nil {
		return nil
	}
	err := c.file.Close()
	c.file = nil
	return err
}

// lastLines splits text into its last lines, without control characters that
// would upset a terminal.
func lastLines(text []byte) []string {
	var lines []string
	for line := range bytes.Lines(text) {
		clean := strings.Map(func(r rune) rune {
			if r < ' ' && r != '\t' || r == 0x7f || r == '\ufffd' {
				return -1
			}
			return r
		}, string(line))
		if strings.TrimSpace(clean) != "" {
			lines = append(lines, strings.TrimRight(clean, " "))
		}
	}
	return lines[max(0, len(lines)-tailLines):]
}

// ReadConsole writes the console log of a machine to w, oldest first, also when
// the machine is not running. No log is an empty one.
func ReadConsole(w io.Writer, p Plan) error {
	for i := p.Console.Keep; i >= 0; i-- {
		path := p.Files.Console
		if i > 0 {
			path = fmt.Sprintf("%s.%d", path, i)
		}
		f, err := os.Open(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("read console log: %w", err)
		}
		_, err = io.Copy(w, f)
		_ = f.Close() // read side only
		if err != nil {
			return fmt.Errorf("read console log: %w", err)
		}
	}
	return nil
}

// cappedFile drops what goes beyond a limit, with a note at the limit.
type cappedFile struct {
	mu   sync.Mutex
	w    io.Writer
	left int
}

func (c *cappedFile) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.left <= 0 {
		return len(p), nil
	}
	c.left -= len(p)
	if _, err := c.w.Write(p); err != nil {
		return 0, err
	}
	if c.left <= 0 {
		_, err := io.WriteString(c.w, "log full, the rest is dropped\n")
		return len(p), err
	}
	return len(p), nil
}
