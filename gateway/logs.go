package gateway

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"
)

// follower copies the end of a log file, and what is written to it later. The
// file may be missing yet, and may be replaced or cut while it is followed.
type follower struct {
	path   string
	lines  int // 0: from the beginning
	follow bool
}

// followPoll is how often a followed file is looked at.
const followPoll = 200 * time.Millisecond

func (f follower) copy(ctx context.Context, w io.Writer) error {
	file, err := os.Open(f.path)
	if errors.Is(err, fs.ErrNotExist) {
		file, err = nil, nil
	}
	if err != nil {
		return fmt.Errorf("read log: %w", err)
	}
	defer func() {
		if file != nil {
			_ = file.Close() // read side only
		}
	}()
	if file != nil {
		if err := seekLines(file, f.lines); err != nil {
			return fmt.Errorf("read log: %w", err)
		}
		if _, err := io.Copy(w, file); err != nil {
			return fmt.Errorf("read log: %w", err)
		}
	}
	if !f.follow {
		return nil
	}
	tick := time.NewTicker(followPoll)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if file, err = f.renew(file); err != nil {
			return fmt.Errorf("follow log: %w", err)
		}
		if file == nil {
			continue
		}
		if _, err := io.Copy(w, file); err != nil {
			return fmt.Errorf("follow log: %w", err)
		}
	}
}

// renew returns the file to go on with: the one that has the path now, from its
// beginning when it is another one or was cut.
func (f follower) renew(file *os.File) (*os.File, error) {
	now, err := os.Stat(f.path)
	if errors.Is(err, fs.ErrNotExist) {
		return file, nil // between two files
	}
	if err != nil {
		return file, err
	}
	if file == nil {
		return os.Open(f.path)
	}
	had, err := file.Stat()
	if err != nil {
		return file, err
	}
	if !os.SameFile(had, now) {
		_ = file.Close() // read side only
		return os.Open(f.path)
	}
	at, err := file.Seek(0, io.SeekCurrent)
	if err == nil && at > now.Size() {
		_, err = file.Seek(0, io.SeekStart)
	}
	return file, err
}

// seekLines puts the file's position before its last n lines.
func seekLines(file *os.File, n int) error {
	if n <= 0 {
		return nil
	}
	end, err := file.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	const step = 8 << 10
	buf := make([]byte, step)
	breaks := -1 // the last line's own end does not count
	for at := end; at > 0; {
		size := min(step, at)
		at -= size
		if _, err := file.ReadAt(buf[:size], at); err != nil {
			return err
		}
		for i := int(size) - 1; i >= 0; i-- {
			if buf[i] != '\n' && at+int64(i) == end-1 {
				breaks++ // the last line has no end
			}
			if buf[i] == '\n' {
				if breaks++; breaks == n {
					_, err := file.Seek(at+int64(i)+1, io.SeekStart)
					return err
				}
			}
		}
	}
	_, err = file.Seek(0, io.SeekStart)
	return err
}

// lastLines are the last n lines of a file, for an error's text; "" when there is none.
func lastLines(path string, n int) string {
	var out bytes.Buffer
	if err := (follower{path: path, lines: n}).copy(context.Background(), &out); err != nil {
		return ""
	}
	return string(bytes.TrimSpace(out.Bytes()))
}
