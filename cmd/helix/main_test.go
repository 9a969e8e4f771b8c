//go:build unix

package main

import (
	"bytes"
	"context"
	"flag"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"go.uber.org/goleak"
)

var update = flag.Bool("update", false, "rewrite golden files")

// leakCheck runs the tests, then looks for goroutines that are left.
type leakCheck struct{ m *testing.M }

func (l leakCheck) Run() int {
	code := l.m.Run()
	if err := goleak.Find(); code == 0 && err != nil {
		_, _ = io.WriteString(os.Stderr, err.Error()+"\n")
		return 1
	}
	return code
}

func TestMain(m *testing.M) {
	time.Local = time.UTC // golden files hold times
	testscript.Main(leakCheck{m}, map[string]func(){"helix": main})
}

// call runs the program in this process, against the gateway of state.
type call struct {
	state string
	stdin string
	env   map[string]string
}

// result is what an invocation left.
type result struct {
	stdout, stderr string
	code           int
}

func (c call) run(ctx context.Context, args ...string) result {
	var stdout, stderr bytes.Buffer
	a := &app{
		stdin: strings.NewReader(c.stdin), stdout: &stdout, stderr: &stderr,
		getenv: func(name string) string {
			if name == "HELIX_STATE" {
				return c.state
			}
			return c.env[name]
		},
	}
	code := a.run(ctx, args)
	return result{stdout.String(), stderr.String(), code}
}

// golden compares got with a file, with the state folder's name taken out.
func golden(t *testing.T, name, state, got string) {
	t.Helper()
	got = strings.ReplaceAll(got, state, "STATE")
	path := filepath.Join("testdata", name+".golden")
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s:\ngot:\n%s\nwant:\n%s", path, got, want)
	}
}
