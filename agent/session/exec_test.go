//go:build linux || darwin

package session

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	gossh "golang.org/x/crypto/ssh"
)

func TestExec(t *testing.T) {
	t.Parallel()
	tg := startTarget(t, own(t))
	cases := map[string]struct {
		command, stdin, stdout, stderr string
		code                           int
	}{
		"zero":              {command: "true"},
		"one":               {command: "exit 1", code: 1},
		"two":               {command: "exit 2", code: 2},
		"126":               {command: "/etc/passwd", code: 126, stderr: "denied"},
		"127":               {command: "no-such-command-here", code: 127, stderr: "no-such-command-here"},
		"255":               {command: "exit 255", code: 255},
		"streams apart":     {command: "echo o; echo e >&2; exit 7", stdout: "o\n", stderr: "e\n", code: 7},
		"killed":            {command: "kill -TERM $$", code: 255},
		"stdin":             {command: "cat", stdin: "in\n", stdout: "in\n"},
		"stdin not read":    {command: "true", stdin: strings.Repeat("x", 1<<20)},
		"starts at home":    {command: "pwd", stdout: tg.home + "\n"},
		"login environment": {command: "echo $HOME $USER $LOGNAME $BASE", stdout: tg.home + " tester tester 1\n"},
		"line ends kept":    {command: `printf 'a\nb\r\n'`, stdout: "a\nb\r\n"},
		"closed stdout":     {command: "exec >&- 2>&-; exit 9", code: 9},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			stdout, stderr, code := tg.ssh(c.stdin, "ws", c.command)
			if stdout != c.stdout || code != c.code || !strings.Contains(stderr, c.stderr) {
				t.Errorf("got %q, %q, code %d; want %q, %q, %d", stdout, stderr, code, c.stdout, c.stderr, c.code)
			}
		})
	}
}

// 200 short commands in a row: no output is lost to an early exit status.
func TestStreamsApartManyTimes(t *testing.T) {
	t.Parallel()
	tg := startTarget(t, own(t))
	client := tg.dial()
	for i := range 200 {
		s, err := client.NewSession()
		if err != nil {
			t.Fatal(err)
		}
		var stdout, stderr bytes.Buffer
		s.Stdout, s.Stderr = &stdout, &stderr
		err = s.Run("echo o; echo e >&2; exit 7")
		exit, ok := err.(*gossh.ExitError)
		if !ok || exit.ExitStatus() != 7 || stdout.String() != "o\n" || stderr.String() != "e\n" {
			t.Fatalf("run %d: %v, stdout %q, stderr %q", i, err, stdout.String(), stderr.String())
		}
	}
}

// OpenSSH closes a channel once it has seen EOF, so the status must be on its way
// before that, and after all output.
func TestStatusBeforeEOF(t *testing.T) {
	t.Parallel()
	client := startTarget(t, own(t)).dial()
	for command, want := range map[string]string{"echo out; exit 3": "exit-status", "echo out; kill -TERM $$": "exit-signal"} {
		ch, reqs, err := client.OpenChannel("session", nil)
		if err != nil {
			t.Fatal(err)
		}
		if ok, err := ch.SendRequest("exec", true, gossh.Marshal(&textPayload{command})); !ok || err != nil {
			t.Fatalf("exec: %v, %v", ok, err)
		}
		out, err := io.ReadAll(ch)
		if err != nil || string(out) != "out\n" {
			t.Errorf("%s: %q, %v", command, out, err)
		}
		select {
		case req := <-reqs:
			if req == nil || req.Type != want {
				t.Errorf("%s: got %v, want %s", command, req, want)
			}
		default:
			t.Errorf("%s: EOF came before the status", command)
		}
		_ = ch.Close() // the server closes it too
		go gossh.DiscardRequests(reqs)
	}
}

func TestExitSignal(t *testing.T) {
	t.Parallel()
	tg := startTarget(t, own(t))
	client := tg.dial()
	for command, want := range map[string]string{"kill -TERM $$": "TERM", "kill -KILL $$": "KILL", "kill -USR1 $$": "USR1", "kill -BUS $$": "SIG7@helix.local"} {
		s, err := client.NewSession()
		if err != nil {
			t.Fatal(err)
		}
		exit, ok := s.Run(command).(*gossh.ExitError)
		if !ok || exit.Signal() != want {
			t.Errorf("%s: got %v, want exit-signal %s", command, exit, want)
		}
	}
}

func TestSignalReachesCommand(t *testing.T) {
	t.Parallel()
	tg := startTarget(t, own(t))
	s, err := tg.dial().NewSession()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := s.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Start("trap 'echo caught; exit 3' USR1; echo up; while :; do sleep 0.05; done"); err != nil {
		t.Fatal(err)
	}
	line := make([]byte, 3)
	if _, err := stdout.Read(line); err != nil || string(line) != "up\n" {
		t.Fatalf("%q, %v", line, err)
	}
	if err := s.Signal(gossh.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	exit, ok := s.Wait().(*gossh.ExitError)
	if !ok || exit.ExitStatus() != 3 {
		t.Errorf("got %v, want status 3", exit)
	}
}

func TestBulk(t *testing.T) {
	t.Parallel()
	tg := startTarget(t, own(t))
	data := randomBytes(t, 10<<20)
	write(t, filepath.Join(tg.home, "data"), string(data))
	if got := tg.must("ws", "cat data"); got != string(data) {
		t.Errorf("cat: %d bytes differ from the %d sent", len(got), len(data))
	}
	stdout, stderr, code := tg.ssh(string(data), "-T", "ws", "cat > copy; wc -c < copy")
	if strings.TrimSpace(stdout) != "10485760" || code != 0 {
		t.Errorf("bulk stdin: %q %q %d", stdout, stderr, code)
	}
	if read(t, filepath.Join(tg.home, "copy")) != string(data) {
		t.Error("bulk stdin: copy differs")
	}
}

// As with OpenSSH, output of a background process belongs to the command; one
// that holds neither stdout nor stderr holds nobody up.
func TestBackgroundProcess(t *testing.T) {
	t.Parallel()
	tg := startTarget(t, own(t))
	if got := tg.must("ws", "(sleep 0.3; echo late) & echo early"); got != "early\nlate\n" {
		t.Errorf("holding stdout: got %q", got)
	}
	began := time.Now()
	tg.must("ws", "sleep 30 >/dev/null 2>&1 & echo $! > pid")
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("detached: returned after %v", took)
	}
	tg.must("ws", "kill $(cat pid)")
}

func TestEnvironment(t *testing.T) {
	t.Parallel()
	tg := startTarget(t, own(t))
	got := tg.must("-o", "SetEnv LC_TEST=l GIT_PROTOCOL=version=2 FOO=bar LD_PRELOAD=/x PATH=/x BASH_ENV=/x HELIX_ADDR=/x",
		"ws", `echo "$LC_TEST|$GIT_PROTOCOL|$FOO|$LD_PRELOAD|$BASH_ENV|$HELIX_ADDR"; echo "$PATH"; set -- $SSH_CONNECTION; echo $#`)
	want := "l|version=2|bar|||\n" + os.Getenv("PATH") + "\n4\n"
	if got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestTerminal(t *testing.T) {
	t.Parallel()
	tg := startTarget(t, own(t))
	client := tg.dial()
	s, err := client.NewSession()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.RequestPty("helix-term", 33, 101, gossh.TerminalModes{gossh.ECHO: 0, gossh.VINTR: 5}); err != nil {
		t.Fatal(err)
	}
	if err := s.WindowChange(44, 102); err != nil { // before the shell
		t.Fatal(err)
	}
	out, err := s.CombinedOutput("stty size; echo $TERM; stty -a | grep -o 'intr = ..\\|-echo ' ; test -t 0 && test -t 1 && test -t 2 && tty; echo $SSH_TTY")
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\r\n")
	if len(lines) != 6 || lines[0] != "44 102" || lines[1] != "helix-term" || lines[2] != "intr = ^E" || lines[3] != "-echo " || lines[4] != lines[5] {
		t.Errorf("got %q", lines)
	}
	stdout, _, code := tg.ssh("", "-tt", "ws", "stty size >/dev/null && exit 5")
	if code != 5 || strings.TrimSpace(stdout) != "" {
		t.Errorf("-tt: %q, code %d", stdout, code)
	}
}

func TestResizeOfRunningShell(t *testing.T) {
	t.Parallel()
	tg := startTarget(t, own(t))
	s, err := tg.dial().NewSession()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.RequestPty("vt100", 24, 80, gossh.TerminalModes{gossh.ECHO: 0}); err != nil {
		t.Fatal(err)
	}
	stdin, err := s.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	var out safeBuffer
	s.Stdout = &out
	if err := s.Start("trap 'stty size; exit 4' WINCH; echo up; read x; while :; do sleep 0.05; done"); err != nil {
		t.Fatal(err)
	}
	if _, err := stdin.Write([]byte("go\n")); err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool { return strings.Contains(out.String(), "up") })
	if err := s.WindowChange(50, 132); err != nil {
		t.Fatal(err)
	}
	exit, ok := s.Wait().(*gossh.ExitError)
	if !ok || exit.ExitStatus() != 4 || !strings.Contains(out.String(), "50 132") {
		t.Errorf("got %v, output %q", exit, out.String())
	}
}

// waitFor polls cond; the test's deadline is the only clock.
func waitFor(t *testing.T, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !cond() {
		select {
		case <-tick.C:
		case <-t.Context().Done():
			t.Fatal("test ended while waiting")
		}
	}
}

func TestShell(t *testing.T) {
	t.Parallel()
	tg := startTarget(t, own(t))
	stdout, stderr, code := tg.ssh("echo $0\nexit 6\n", "-T", "ws")
	if stdout != "-sh\n" || stderr != "" || code != 6 {
		t.Errorf("login shell: %q %q %d", stdout, stderr, code)
	}
	// End of input under a terminal ends the shell.
	if _, _, code := tg.ssh("", "-tt", "ws", "cat"); code != 0 {
		t.Errorf("cat under a terminal at end of input: code %d", code)
	}
}

func TestNothingToRun(t *testing.T) {
	t.Parallel()
	a := own(t)
	a.Shell = "/no/such/shell"
	tg := startTarget(t, a)
	_, stderr, code := tg.ssh("", "ws", "true")
	if code != 127 || !strings.Contains(stderr, `start shell /no/such/shell of account "tester": no such file`) {
		t.Errorf("no shell: code %d, %q", code, stderr)
	}
	a = own(t)
	a.Home = "/no/such/home"
	a.Own = true
	tg = startTarget(t, a)
	stdout, stderr, code := tg.ssh("", "ws", "pwd")
	if code == 0 || stdout != "" || !strings.Contains(stderr, "workspace folder /no/such/home") {
		t.Errorf("a command of another folder ran: %q %q %d", stdout, stderr, code)
	}
}

// A client that goes away takes its command along.
func TestVanishedClient(t *testing.T) {
	t.Parallel()
	tg := startTarget(t, own(t))
	client := tg.dial()
	s, err := client.NewSession()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := s.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Start("echo up; exec sleep 1000"); err != nil {
		t.Fatal(err)
	}
	if _, err := stdout.Read(make([]byte, 3)); err != nil {
		t.Fatal(err)
	}
	if err := client.Close(); err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool {
		tg.mu.Lock()
		defer tg.mu.Unlock()
		return len(tg.running) == 0
	})
}

// One channel that goes wrong leaves the others alone.
func TestBadChannelKeepsConnection(t *testing.T) {
	t.Parallel()
	client := startTarget(t, own(t)).dial()
	if _, _, err := client.OpenChannel("no-such-type", nil); err == nil {
		t.Error("unknown channel type accepted")
	}
	for _, kind := range []string{"direct-tcpip", "direct-streamlocal@openssh.com"} {
		if _, _, err := client.OpenChannel(kind, []byte{1, 2}); err == nil {
			t.Errorf("%s with a malformed payload accepted", kind)
		}
	}
	ch, reqs, err := client.OpenChannel("session", nil)
	if err != nil {
		t.Fatal(err)
	}
	go gossh.DiscardRequests(reqs)
	for _, kind := range []string{"exec", "pty-req", "env", "signal", "subsystem", "window-change", "x11-req", "no-such-request"} {
		if ok, err := ch.SendRequest(kind, true, []byte{0, 0, 0, 99}); ok || err != nil {
			t.Errorf("%s with a malformed payload: %v, %v", kind, ok, err)
		}
	}
	for _, kind := range []string{"tcpip-forward", "streamlocal-forward@openssh.com", "cancel-tcpip-forward", "cancel-streamlocal-forward@openssh.com", "keepalive@openssh.com"} {
		if ok, _, err := client.SendRequest(kind, true, []byte{9}); ok || err != nil {
			t.Errorf("%s with a malformed payload: %v, %v", kind, ok, err)
		}
	}
	s, err := client.NewSession()
	if err != nil {
		t.Fatal(err)
	}
	if out, err := s.Output("echo fine"); err != nil || string(out) != "fine\n" {
		t.Errorf("after it all: %q, %v", out, err)
	}
}
