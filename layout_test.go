package helix

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "helix.local/helix"

// layout says what each folder may import of ours; a folder not named here takes
// the rule of the one above it. Every folder may import what is below it, and a
// new top-level folder starts with a line here.
var layout = map[string][]string{
	".":          {},
	"cmd":        {"..."},
	"e2e":        {"..."},
	"gateway":    {".", "sshd", "dnsd", "workspaces", "vmctl", "tunnel", "agent/wire"},
	"sshd":       {},
	"dnsd":       {},
	"workspaces": {},
	"vmctl":      {},
	"tunnel":     {"agent/wire"},
	"agent":      {"tunnel"},
	"agent/wire": {},
}

// The sizes beyond which a file or a function has a second noun in it.
const (
	maxFileLines = 600
	maxFuncLines = 60
)

// source is one parsed file of ours.
type source struct {
	path string // slashed, from the root
	ast  *ast.File
	set  *token.FileSet
}

func (s source) test() bool { return strings.HasSuffix(s.path, "_test.go") }

func (s source) at(n ast.Node) string {
	return fmt.Sprintf("%s:%d", s.path, s.set.Position(n.Pos()).Line)
}

// walk calls each with every file of ours, other than test data, that fits.
func walk(t *testing.T, fits func(name string) bool, each func(path string)) {
	t.Helper()
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		switch name := d.Name(); {
		case err != nil:
			return err
		case d.IsDir() && (name == "testdata" || name != "." && name[0] == '.' || path == "bin"):
			return filepath.SkipDir
		case !d.IsDir() && fits(name):
			each(filepath.ToSlash(path))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func sources(t *testing.T) []source {
	t.Helper()
	var all []source
	walk(t, func(name string) bool { return strings.HasSuffix(name, ".go") }, func(path string) {
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, path, nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, source{path, file, set})
	})
	return all
}

func TestImportsGoDown(t *testing.T) {
	for _, s := range sources(t) {
		folder := path.Dir(s.path)
		rule := folder
		for layout[rule] == nil && rule != "." {
			rule = path.Dir(rule)
		}
		if rule == "." && folder != "." {
			t.Errorf("%s: folder %s has no line in the table of layout_test.go", s.path, folder)
			continue
		}
		for _, spec := range s.ast.Imports {
			name, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				t.Fatal(err)
			}
			ours, ok := strings.CutPrefix(name+"/", module+"/")
			if !ok {
				continue
			}
			if !mayImport(rule, path.Clean(ours)) {
				t.Errorf("%s: %s may not import %s", s.at(spec), rule, name)
			}
		}
	}
}

// mayImport reports whether a folder under rule may import the folder target.
func mayImport(rule, target string) bool {
	for _, allowed := range append(layout[rule], rule) {
		if allowed == "..." || allowed == target || allowed != "." && strings.HasPrefix(target, allowed+"/") {
			return true
		}
	}
	return false
}

// forbidden are calls that a habit of ours rules out, and what to do instead.
// The key is package or receiver, a dot, and the name.
var forbidden = map[string]string{
	"fmt.Print":       "write to the io.Writer you were given",
	"fmt.Printf":      "write to the io.Writer you were given",
	"fmt.Println":     "write to the io.Writer you were given",
	"slog.SetDefault": "log through the *slog.Logger you were given",
	"slog.Default":    "log through the *slog.Logger you were given",
	"time.Sleep":      "wait for the event",
	"t.Skip":          "a test that does not run checks nothing",
	"t.Skipf":         "a test that does not run checks nothing",
	"t.SkipNow":       "a test that does not run checks nothing",
}

func TestHabits(t *testing.T) {
	for _, s := range sources(t) {
		if lines := s.set.File(s.ast.Pos()).LineCount(); lines > maxFileLines {
			t.Errorf("%s has %d lines, more than %d", s.path, lines, maxFileLines)
		}
		ast.Inspect(s.ast, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.FuncDecl:
				if n.Name.Name == "init" && n.Recv == nil {
					t.Errorf("%s: func init: set it in the constructor", s.at(n))
				}
				lines := s.set.Position(n.End()).Line - s.set.Position(n.Pos()).Line - 1
				if lines > maxFuncLines && !s.test() {
					t.Errorf("%s: %s has %d lines, more than %d", s.at(n), n.Name.Name, lines, maxFuncLines)
				}
			case *ast.CallExpr:
				name := callName(n)
				if s.test() && strings.HasPrefix(name, "fmt.") {
					return true // an example prints
				}
				if why := forbidden[name]; why != "" {
					t.Errorf("%s: %s: %s", s.at(n), name, why)
				}
			}
			return true
		})
	}
}

// callName is "package.Name" or "receiver.Name" of a call, else "".
func callName(call *ast.CallExpr) string {
	selector, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return ""
	}
	of, ok := selector.X.(*ast.Ident)
	if !ok {
		return ""
	}
	return of.Name + "." + selector.Sel.Name
}

// Every package has a package comment, and every top-level folder a README with
// the same sections.
func TestEveryFolderIsExplained(t *testing.T) {
	explained, folders := map[string]bool{}, map[string]bool{}
	top := map[string]bool{"deploy": true}
	for _, s := range sources(t) {
		folder := path.Dir(s.path)
		folders[folder] = folders[folder] || !s.test()
		explained[folder] = explained[folder] || s.ast.Doc != nil && !s.test()
	}
	for folder, code := range folders {
		if code && !explained[folder] {
			t.Errorf("%s: no file has a package comment", folder)
		}
		if first, _, _ := strings.Cut(folder, "/"); code && folder != "." {
			top[first] = true
		}
	}
	for folder := range top {
		if err := readmeFault(folder); err != nil {
			t.Errorf("%s: %v", folder, err)
		}
	}
}

var heading = regexp.MustCompile(`(?m)^## (.*)$`)

func readmeFault(folder string) error {
	text, err := os.ReadFile(filepath.Join(folder, "README.md"))
	if err != nil {
		return err
	}
	var got []string
	for _, m := range heading.FindAllStringSubmatch(string(text), -1) {
		got = append(got, m[1])
	}
	if want := []string{"What it is", "How it fits", "Configuration", "Example", "Limits"}; !slices.Equal(got, want) {
		return fmt.Errorf("README.md has the sections %q, want %q", got, want)
	}
	if lines := strings.Count(string(text), "\n"); lines > 60 {
		return fmt.Errorf("README.md has %d lines, more than 60", lines)
	}
	return nil
}

func TestDecisionsHaveOneForm(t *testing.T) {
	want := []string{"Context", "Decision", "Consequences", "Rejected"}
	walk(t, func(name string) bool { return strings.HasSuffix(name, ".md") }, func(path string) {
		if !strings.HasPrefix(path, "docs/adr/") {
			return
		}
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, m := range heading.FindAllStringSubmatch(string(text), -1) {
			got = append(got, m[1])
		}
		if !strings.HasPrefix(string(text), "# ") || !slices.Equal(got, want) {
			t.Errorf("%s: sections %q, want a title and %q", path, got, want)
		}
	})
}
