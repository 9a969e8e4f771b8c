//go:build linux

package process

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// TestMain also is a program that adopts orphans: what it does changes its
// whole process, and the tests are children's parents themselves.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == "adopt" {
		if err := adopt(); err != nil {
			fmt.Println(err) //nolint:forbidigo // the test reads it
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// adopt starts children while orphans die around them: every status must reach
// its owner, every orphan must be reaped, and a daemon must be found and ended.
func adopt() error {
	if err := Subreaper(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	r := NewReaper()
	ran := make(chan error, 1)
	reaping, stop := context.WithCancel(ctx)
	defer stop()
	go func() { ran <- r.Run(reaping) }()
	for i := range 100 {
		child, err := r.Start(exec.Command("/bin/sh", "-c", fmt.Sprintf("(exit 3 &) ; (exit 4 &) ; exit %d", i)))
		if err != nil {
			return err
		}
		err = child.Wait()
		exit, _ := errors.AsType[*exec.ExitError](err)
		if i == 0 && err != nil || i > 0 && (exit == nil || exit.ExitCode() != i) {
			return fmt.Errorf("child %d: %w", i, err)
		}
	}
	if err := adoptAtOnce(r); err != nil {
		return err
	}
	for _, daemon := range []string{"(setsid sleep 1000 &)", "(trap '' TERM HUP; setsid sh -c 'while :; do sleep 0.01; done' &)"} {
		child, err := r.Start(exec.Command("/bin/sh", "-c", daemon))
		if err != nil {
			return err
		}
		if err := child.Wait(); err != nil {
			return err
		}
	}
	list := func() ([]int, error) { return Descendants(os.Getpid()) }
	if found, err := list(); err != nil || len(found) < 2 {
		return fmt.Errorf("daemons not seen: %v, %w", found, err)
	}
	if err := EndAll(ctx, list, 100*time.Millisecond); err != nil {
		return err
	}
	stop()
	return errors.Join(<-ran, ctx.Err(), r.reapOrphans(ctx), noChildren())
}

// adoptAtOnce starts many children from many goroutines.
func adoptAtOnce(r *Reaper) error {
	outcomes := make(chan error)
	const goroutines, each = 8, 20
	for g := range goroutines {
		go func() {
			var failed error
			for i := range each {
				want := g*each + i
				child, err := r.Start(exec.Command("/bin/sh", "-c", fmt.Sprintf("(sleep 0.01 &) ; exit %d", want)))
				if err == nil {
					err = child.Wait()
				}
				exit, _ := errors.AsType[*exec.ExitError](err)
				if want == 0 && err != nil || want > 0 && (exit == nil || exit.ExitCode() != want) {
					failed = errors.Join(failed, fmt.Errorf("child %d: %w", want, err))
				}
			}
			outcomes <- failed
		}()
	}
	var failed error
	for range goroutines {
		failed = errors.Join(failed, <-outcomes)
	}
	return failed
}

func noChildren() error {
	if _, err := peek(unix.P_ALL, 0, unix.WNOHANG); !errors.Is(err, unix.ECHILD) {
		return fmt.Errorf("children left: %w", err)
	}
	return nil
}

func TestAdopt(t *testing.T) {
	t.Parallel()
	if out, err := exec.Command(os.Args[0], "adopt").CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

func TestChild(t *testing.T) {
	t.Parallel()
	var none *Reaper
	if _, err := none.Start(exec.Command("/no/such/program")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing program: %v", err)
	}
	cmd := exec.Command("/bin/sh", "-c", "sleep 1000 & echo $!; wait")
	cmd.SysProcAttr = &unix.SysProcAttr{Setsid: true}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	child, err := none.Start(cmd)
	if err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	inner, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		t.Fatal(err)
	}
	if below, err := Descendants(child.PID()); err != nil || !slices.Contains(below, inner) {
		t.Errorf("descendants %v, %v; want %d among them", below, err, inner)
	}
	if err := child.SignalGroup(unix.SIGKILL); err != nil {
		t.Error(err)
	}
	if err := child.Wait(); err == nil {
		t.Error("killed child ended well")
	}
	if err := child.SignalGroup(unix.SIGKILL); err != nil {
		t.Errorf("signal after the end: %v", err)
	}
}

func TestParseStat(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]struct {
		parent int
		state  byte
	}{
		"12 (sh) S 7 12 12": {7, 'S'}, "12 (a) b) Z 9 1": {9, 'Z'}, "": {}, "12 (x)": {}, "12 (x) S": {}, "12 (x) S y": {}, "1 (x) SS 1": {},
	} {
		if parent, state := parseStat([]byte(text)); parent != want.parent || state != want.state {
			t.Errorf("%q: %d %c", text, parent, state)
		}
	}
}

func FuzzStat(f *testing.F) {
	f.Add([]byte("12 (a) b) Z 9 1"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if parent, state := parseStat(b); parent != 0 && state == 0 {
			t.Errorf("parent %d without state", parent)
		}
	})
}

func TestEndAllGivesUp(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	// A number beyond pid_max is nobody's.
	if err := EndAll(ctx, func() ([]int, error) { return []int{1 << 30}, nil }, time.Hour); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	broken := errors.New("no list")
	if err := EndAll(t.Context(), func() ([]int, error) { return nil, broken }, 0); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
}

// A stopped process cannot act on SIGTERM; it is ended all the same, in time.
func TestEndAllStopped(t *testing.T) {
	t.Parallel()
	cmd := exec.Command("/bin/sh", "-c", "kill -STOP $$; exit 0")
	cmd.SysProcAttr = &unix.SysProcAttr{Setsid: true}
	var none *Reaper
	child, err := none.Start(cmd)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- child.Wait() }()
	gone := false
	list := func() ([]int, error) {
		select {
		case <-ended:
			gone = true
		default:
		}
		if gone {
			return nil, nil
		}
		return []int{child.PID()}, nil
	}
	if err := EndAll(t.Context(), list, time.Hour); err != nil {
		t.Error(err)
	}
}

func TestNumbered(t *testing.T) {
	t.Parallel()
	if _, err := numbered("/no/such/folder"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
	found, err := numbered("/proc")
	if err != nil || !slices.Contains(found, os.Getpid()) {
		t.Errorf("own process not among %v, %v", found, err)
	}
}
