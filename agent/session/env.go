package session

import (
	"strings"
)

const (
	maxEnvNames = 256
	maxEnvBytes = 64 << 10
	defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)

// environment is what the client sets with SendEnv and SetEnv.
type environment struct {
	list []string
	size int
}

// set adds a variable and reports whether it was accepted. Clients may set
// everything but what changes how the programs of a login are found and loaded,
// or what the server itself says.
func (e *environment) set(name, value string) bool {
	if !envAllowed(name) || strings.ContainsRune(value, 0) ||
		len(e.list) >= maxEnvNames || e.size+len(name)+len(value) > maxEnvBytes {
		return false
	}
	e.list = append(e.list, name+"="+value)
	e.size += len(name) + len(value)
	return true
}

func envAllowed(name string) bool {
	if name == "" || name[0] >= '0' && name[0] <= '9' {
		return false
	}
	for _, c := range []byte(name) {
		if c != '_' && (c < '0' || c > '9') && (c < 'A' || c > 'Z') && (c < 'a' || c > 'z') {
			return false
		}
	}
	upper := strings.ToUpper(name)
	for _, prefix := range []string{"LD_", "DYLD_", "SSH_", "HELIX_", "BASH_FUNC_", "GCONV_", "MALLOC_"} {
		if strings.HasPrefix(upper, prefix) {
			return false
		}
	}
	switch upper {
	case "HOME", "USER", "LOGNAME", "SHELL", "PATH", "PWD", "OLDPWD", "IFS", "ENV", "BASH_ENV", "SHELLOPTS", "BASHOPTS", "PS4", "TERM", "LOCPATH", "NLSPATH", "HOSTALIASES", "LOCALDOMAIN", "RES_OPTIONS":
		return false
	}
	return true
}

// merge joins environments; of one name the last value stays.
func merge(lists ...[]string) []string {
	var merged []string
	place := make(map[string]int)
	for _, list := range lists {
		for _, pair := range list {
			name, _, ok := strings.Cut(pair, "=")
			if !ok || name == "" {
				continue
			}
			if i, ok := place[name]; ok {
				merged[i] = pair
				continue
			}
			place[name] = len(merged)
			merged = append(merged, pair)
		}
	}
	return merged
}

// accountEnv is what a login sets for a.
func accountEnv(a Account) []string {
	return []string{"HOME=" + a.Home, "USER=" + a.Name, "LOGNAME=" + a.Name, "SHELL=" + a.Shell}
}
