package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"unicode"
	"unicode/utf8"
)

// clean makes text that comes from a workspace safe for a terminal: control
// characters, which could move the cursor or set the title, become visible.
func clean(text string) string { return string(cleaned([]byte(text))) }

func cleaned(text []byte) []byte {
	out := make([]byte, 0, len(text))
	for len(text) > 0 {
		r, size := utf8.DecodeRune(text)
		switch {
		case r == '\n' || r == '\t':
			out = append(out, byte(r))
		case r == utf8.RuneError && size == 1: // not UTF-8: a terminal may take it for a C1 control
			out = utf8.AppendRune(out, utf8.RuneError)
		case r < ' ':
			out = append(out, '^', byte(r)+'@')
		case unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r):
			out = append(out, strings.Trim(strconv.QuoteRuneToASCII(r), "'")...)
		default:
			out = append(out, text[:size]...)
		}
		text = text[size:]
	}
	return out
}

// cleanWriter passes clean text on. It keeps the beginning of a character that
// a Write ends in, until the next.
type cleanWriter struct {
	w    io.Writer
	rest []byte
}

func (c *cleanWriter) Write(p []byte) (int, error) {
	text := append(c.rest, p...)
	cut := len(text)
	for back := 1; back <= utf8.UTFMax && back <= len(text); back++ {
		if utf8.RuneStart(text[len(text)-back]) {
			if !utf8.FullRune(text[len(text)-back:]) {
				cut = len(text) - back
			}
			break
		}
	}
	// A console ends its lines with CR LF; alone, CR overwrites a line.
	shown := strings.ReplaceAll(string(text[:cut]), "\r\n", "\n")
	c.rest = append([]byte(nil), text[cut:]...)
	if _, err := c.w.Write(cleaned([]byte(strings.TrimSuffix(shown, "\r")))); err != nil {
		return 0, fmt.Errorf("write: %w", err)
	}
	return len(p), nil
}

// quote quotes an argument for a POSIX shell, which then sees it exactly.
func quote(arg string) string {
	plain := func(r rune) bool {
		return r < utf8.RuneSelf && (unicode.IsLetter(r) || unicode.IsDigit(r) || strings.ContainsRune("%+,-./:=@_", r))
	}
	if arg != "" && strings.IndexFunc(arg, func(r rune) bool { return !plain(r) }) < 0 {
		return arg
	}
	return "'" + strings.ReplaceAll(arg, "'", `'\''`) + "'"
}

// quoteAll makes one command line of argv. The first word is always quoted:
// bare, the shell might take it for an assignment or a word of its own grammar.
func quoteAll(argv []string) string {
	words := make([]string, len(argv))
	for i, arg := range argv {
		words[i] = quote(arg)
		if i == 0 && words[i] == arg {
			words[i] = "'" + arg + "'"
		}
	}
	return strings.Join(words, " ")
}

// printJSON prints v as one document.
func (a *app) printJSON(v any) error {
	text := json.NewEncoder(a.stdout)
	text.SetIndent("", "  ")
	if err := text.Encode(v); err != nil {
		return fmt.Errorf("print JSON: %w", err)
	}
	return nil
}

// printList prints a list; none at all is [] rather than null.
func printList[T any](a *app, list []T) error {
	if list == nil {
		list = []T{}
	}
	return a.printJSON(list)
}

// printTable prints rows in columns. Empty cells become "-", so that the
// columns can be counted.
func (a *app) printTable(head []string, rows [][]string) error {
	table := tabwriter.NewWriter(a.stdout, 0, 0, 2, ' ', 0)
	for _, row := range append([][]string{head}, rows...) {
		cells := make([]string, len(row))
		for i, cell := range row {
			cells[i] = strings.NewReplacer("\n", " ", "\t", " ").Replace(clean(cell))
			if cell == "" {
				cells[i] = "-"
			}
		}
		fmt.Fprintln(table, strings.Join(cells, "\t"))
	}
	if err := table.Flush(); err != nil {
		return fmt.Errorf("print table: %w", err)
	}
	return nil
}

// byteSize is a number of bytes for people.
func byteSize(n int64) string {
	const unit = 1024
	if n < unit {
		return fmt.Sprintf("%d B", n)
	}
	value, prefix := float64(n)/unit, "KMGTPE"
	for value >= unit {
		value, prefix = value/unit, prefix[1:]
	}
	return fmt.Sprintf("%.1f %ciB", value, prefix[0])
}
