package session

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
)

// Account is whom a program runs as.
type Account struct {
	Name     string
	UID, GID uint32
	Groups   []uint32 // supplementary
	Home     string
	Shell    string
	Own      bool // is the account this process runs as: nothing to switch
}

// ErrNoAccount reports that no account has the asked name.
var ErrNoAccount = errors.New("no such account")

// Lookup finds an account by name in the passwd and group files below root,
// usually "/etc".
func Lookup(root, name string) (Account, error) {
	passwd, err := os.ReadFile(root + "/passwd")
	if err != nil {
		return Account{}, fmt.Errorf("look up account %q: %w", name, err)
	}
	a, ok := parsePasswd(string(passwd), func(a Account) bool { return a.Name == name })
	if !ok {
		return Account{}, fmt.Errorf("look up account %q: %w", name, ErrNoAccount)
	}
	return withGroups(root, a)
}

// LookupID finds an account by number, as Lookup does by name.
func LookupID(root string, uid uint32) (Account, error) {
	passwd, err := os.ReadFile(root + "/passwd")
	if err != nil {
		return Account{}, fmt.Errorf("look up account %d: %w", uid, err)
	}
	a, ok := parsePasswd(string(passwd), func(a Account) bool { return a.UID == uid })
	if !ok {
		return Account{}, fmt.Errorf("look up account %d: %w", uid, ErrNoAccount)
	}
	return withGroups(root, a)
}

func withGroups(root string, a Account) (Account, error) {
	group, err := os.ReadFile(root + "/group")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return Account{}, fmt.Errorf("look up groups of %q: %w", a.Name, err)
	}
	a.Groups = parseGroups(string(group), a.Name)
	a.Own = int(a.UID) == os.Geteuid()
	return a, nil
}

// parsePasswd returns the first well-formed line of a passwd(5) file that
// wanted accepts.
func parsePasswd(text string, wanted func(Account) bool) (Account, bool) {
	for line := range strings.Lines(text) {
		f := strings.Split(strings.TrimRight(line, "\r\n"), ":")
		if len(f) != 7 || f[0] == "" {
			continue
		}
		uid, err1 := strconv.ParseUint(f[2], 10, 32)
		gid, err2 := strconv.ParseUint(f[3], 10, 32)
		if err1 != nil || err2 != nil {
			continue
		}
		a := Account{Name: f[0], UID: uint32(uid), GID: uint32(gid), Home: f[5], Shell: f[6]}
		if a.Home == "" {
			a.Home = "/"
		}
		if a.Shell == "" {
			a.Shell = "/bin/sh"
		}
		if wanted(a) {
			return a, true
		}
	}
	return Account{}, false
}

// parseGroups lists the groups of a group(5) file that name is a member of.
func parseGroups(text, name string) []uint32 {
	var found []uint32
	for line := range strings.Lines(text) {
		f := strings.Split(strings.TrimRight(line, "\r\n"), ":")
		if len(f) != 4 || !slices.Contains(strings.Split(f[3], ","), name) {
			continue
		}
		if gid, err := strconv.ParseUint(f[2], 10, 32); err == nil {
			found = append(found, uint32(gid))
		}
	}
	return found
}
