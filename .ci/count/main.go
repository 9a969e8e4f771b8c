// Command count reads the events of "go test -json" from standard input, prints
// what a person needs of them, and writes the numbers of passed and of failed
// tests to the file named by its argument. A skipped test has checked nothing and
// counts as failed, and so does a package that ends without saying which test
// was to blame.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
)

// event is one line of "go test -json", see "go doc test2json".
type event struct {
	Action     string
	Package    string
	ImportPath string // of build events
	Test       string
	Output     string
	Elapsed    float64
}

// count is what is known so far.
type count struct {
	out            io.Writer
	passed, failed int
	output         map[string]*strings.Builder // of what has not ended yet, by package and test
	blamed         map[string]bool             // packages of which a test failed
}

func main() {
	c := &count{out: os.Stdout, output: map[string]*strings.Builder{}, blamed: map[string]bool{}}
	if err := run(c, os.Stdin, os.Args[1:]); err != nil {
		_, _ = fmt.Fprintln(os.Stderr, "count:", err)
		os.Exit(1)
	}
}

func run(c *count, in io.Reader, args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("want one argument, the file for the numbers, got %d", len(args))
	}
	lines := bufio.NewReader(in)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			c.line(line)
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
	}
	return os.WriteFile(args[0], fmt.Appendf(nil, "%d %d\n", c.passed, c.failed), 0o600)
}

func (c *count) line(line []byte) {
	var e event
	if json.Unmarshal(line, &e) != nil {
		c.print(string(line)) // not an event: the go command itself speaks
		return
	}
	key := e.Package + " " + e.Test
	switch e.Action {
	case "output":
		if c.output[key] == nil {
			c.output[key] = &strings.Builder{}
		}
		c.output[key].WriteString(e.Output)
	case "build-output":
		c.print(e.Output)
	case "pass", "fail", "skip":
		c.end(e, key)
		delete(c.output, key)
	}
}

// end counts what a test or a package came to.
func (c *count) end(e event, key string) {
	text := ""
	if b := c.output[key]; b != nil {
		text = b.String()
	}
	switch {
	case e.Test == "" && e.Action == "fail":
		if !c.blamed[e.Package] {
			c.failed++
			c.print(text)
		}
		c.print(fmt.Sprintf("FAIL %s %.1fs\n", e.Package, e.Elapsed))
	case e.Test == "" && e.Action == "pass":
		c.print(fmt.Sprintf("ok   %s %.1fs\n", e.Package, e.Elapsed))
	case e.Test == "": // a package without tests
	case e.Action == "pass":
		c.passed++
	case e.Action == "skip":
		c.failed++
		c.print("SKIPPED, which counts as failed:\n" + text)
	default:
		c.failed++
		c.blamed[e.Package] = true
		c.print(text)
	}
}

func (c *count) print(text string) { _, _ = io.WriteString(c.out, text) } // there is nowhere else to say it
