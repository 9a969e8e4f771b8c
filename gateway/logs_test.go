package gateway

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestLogsLastLines(t *testing.T) {
	long := strings.Repeat("x", 20_000)
	cases := map[string]struct {
		text  string
		lines int
		want  string
	}{
		"all":                   {"a\nb\nc\n", 0, "a\nb\nc\n"},
		"last two":              {"a\nb\nc\n", 2, "b\nc\n"},
		"last without end":      {"a\nb\nc", 2, "b\nc"},
		"more than there are":   {"a\nb\n", 9, "a\nb\n"},
		"exactly all":           {"a\nb\n", 2, "a\nb\n"},
		"empty":                 {"", 3, ""},
		"lines beyond one read": {"a\n" + long + "\n" + long + "\n", 2, long + "\n" + long + "\n"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "log")
			if err := os.WriteFile(path, []byte(c.text), 0o600); err != nil {
				t.Fatal(err)
			}
			var got bytes.Buffer
			if err := (follower{path: path, lines: c.lines}).copy(t.Context(), &got); err != nil {
				t.Fatal(err)
			}
			if got.String() != c.want {
				t.Errorf("got %d bytes %.40q, want %d bytes %.40q", got.Len(), got.String(), len(c.want), c.want)
			}
		})
	}
}

// lineWriter hands each write over, so that a test can wait for it.
type lineWriter chan string

func (w lineWriter) Write(p []byte) (int, error) {
	w <- string(p)
	return len(p), nil
}

func TestLogsFollowsThroughRotation(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	ctx, cancel := context.WithCancel(t.Context())
	got, ended := make(lineWriter), make(chan error, 1)
	go func() { ended <- follower{path: path, follow: true}.copy(ctx, got) }()
	// The file does not exist yet, grows, is replaced, is cut.
	write := func(text string, flags int) {
		t.Helper()
		f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|flags, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteString(text); err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
		if said := <-got; said != text {
			t.Errorf("got %q, want %q", said, text)
		}
	}
	write("first line\n", 0)
	write("second\n", os.O_APPEND)
	if err := os.Rename(path, path+".1"); err != nil {
		t.Fatal(err)
	}
	write("after rotation\n", 0)
	write("cut\n", os.O_TRUNC)
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
