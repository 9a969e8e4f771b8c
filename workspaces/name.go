package workspaces

import (
	"errors"
	"fmt"
	"strings"
)

// maxLabel is the length of a DNS label (RFC 1035, section 2.3.4).
const maxLabel = 63

// ErrReserved reports a name that must not become a workspace's.
var ErrReserved = errors.New("name is reserved")

// A NameError says why a name was refused.
type NameError struct {
	Name   string
	Reason string
	Better string // a name that would do, or ""

	reserved bool
}

// Error names the name and the broken rule.
func (e *NameError) Error() string { return fmt.Sprintf("name %q: %s", e.Name, e.Reason) }

// Is makes errors.Is(err, ErrReserved) tell reserved names from malformed ones.
func (e *NameError) Is(target error) bool { return e.reserved && target == ErrReserved }

// Hint proposes a name that would do.
func (e *NameError) Hint() string {
	if e.Better == "" {
		return "use lower-case letters, digits and hyphens, for example \"demo\""
	}
	return fmt.Sprintf("try %q", e.Better)
}

// CheckName returns a *NameError unless name may be a workspace's: a DNS label
// in lower case (RFC 1123, section 2.1) that is not a number and not reserved.
func CheckName(name string) error {
	if reason := labelFault(name); reason != "" {
		return &NameError{Name: name, Reason: reason, Better: betterName(name)}
	}
	if reason := reservedFor(name); reason != "" {
		return &NameError{Name: name, Reason: "reserved: " + reason, Better: betterName("my-" + name), reserved: true}
	}
	return nil
}

// labelFault returns the rule that name breaks, or "".
func labelFault(name string) string {
	digits := true
	for i := range len(name) {
		switch c := name[i]; {
		case c >= '0' && c <= '9':
		case c >= 'a' && c <= 'z', c == '-':
			digits = false
		case c >= 'A' && c <= 'Z':
			return "has upper-case letters; DNS makes no difference between cases, so names are kept in lower case"
		default:
			return "has a character other than a-z, 0-9 and -"
		}
	}
	switch {
	case name == "":
		return "is empty"
	case len(name) > maxLabel:
		return fmt.Sprintf("has %d characters, a DNS label has at most %d", len(name), maxLabel)
	case name[0] == '-' || name[len(name)-1] == '-':
		return "begins or ends with a hyphen"
	case digits:
		return "is all digits and would be taken for a port"
	case strings.HasPrefix(name, "xn--"):
		return "begins with xn--, which marks an encoded international name"
	}
	return ""
}

// betterName bends name until it passes, or returns "".
func betterName(name string) string {
	var b strings.Builder
	for _, c := range strings.ToLower(name) {
		switch {
		case c >= 'a' && c <= 'z', c >= '0' && c <= '9':
			b.WriteRune(c)
		case b.Len() > 0:
			b.WriteByte('-')
		}
	}
	better := strings.TrimPrefix(b.String(), "xn--")
	better = strings.Trim(better[:min(len(better), maxLabel)], "-")
	if better != "" && strings.Trim(better, "0123456789") == "" {
		better = ("ws-" + better)[:min(len(better)+3, maxLabel)]
	}
	if labelFault(better) != "" || reservedFor(better) != "" {
		return ""
	}
	return better
}

// reservedFor returns what a reserved name is kept for, or "".
func reservedFor(name string) string {
	switch name {
	case "gw":
		return "it is the gateway's own name"
	case "helix", "api", "console", "dashboard", "status":
		return "it is kept for the gateway's own pages"
	case "www":
		return "browsers hide or add it by themselves"
	case "local", "localhost", "localdomain", "internal":
		return "resolvers give it a meaning of their own"
	case "wpad", "isatap", "autoconfig", "autodiscover":
		return "operating systems and mail programs ask for it to find a configuration they then obey"
	case "ns", "ns1", "ns2", "dns", "mx", "mail", "smtp", "ntp", "ldap", "kerberos":
		return "by custom it names a network service of the zone"
	}
	return ""
}

// nearest returns the candidate that was most likely meant by name, or "".
func nearest(name string, candidates func(yield func(string) bool)) string {
	best, limit := "", 1+len(name)/4
	for c := range candidates {
		if d := len(c) - len(name); d > limit || -d > limit {
			continue
		}
		d := editDistance(name, c)
		if d < limit || d == limit && (best == "" || c < best) {
			best, limit = c, d
		}
	}
	return best
}

// editDistance counts insertions, deletions, replacements and swaps of
// neighbours between two short strings.
func editDistance(a, b string) int {
	var before, last, row []int
	last = make([]int, len(b)+1)
	for j := range last {
		last[j] = j
	}
	for i := range len(a) {
		row = make([]int, len(b)+1)
		row[0] = i + 1
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			row[j+1] = min(last[j]+cost, last[j+1]+1, row[j]+1)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				row[j+1] = min(row[j+1], before[j-1]+1)
			}
		}
		before, last = last, row
	}
	return last[len(b)]
}
