package sshd

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"unicode"

	"golang.org/x/crypto/ssh"
)

// ClientConfig is what the generated configuration of OpenSSH's client says.
// The paths are absolute.
type ClientConfig struct {
	Helix      string   // path of the helix program
	State      string   // state folder
	KnownHosts string   // file with the text of KnownHosts
	Identity   string   // private key to log in with; "": the user's own ones
	Zones      []string // none: helix.local and helix.internal
	Hosts      []Host   // for the bare names and the addresses; only Name and Names are used
	NoPassFD   bool     // for a system whose ssh has no ProxyUseFDPass
}

// Text returns the configuration. It is pure. A path that ssh cannot be told is
// an error with a hint.
//
// A workspace answers to its bare name too, which comes before a "Host" of the
// same name in the user's own configuration.
func (c ClientConfig) Text() ([]byte, error) {
	paths := []string{c.Helix, c.State, c.KnownHosts}
	if c.Identity != "" {
		paths = append(paths, c.Identity)
	}
	for _, path := range paths {
		if err := checkPath(path); err != nil {
			return nil, err
		}
	}
	var bare, all []string
	for _, zone := range defaultZones(c.Zones) {
		all = append(all, "*."+zone)
	}
	for _, h := range c.Hosts {
		if h.Name != GatewayName { // its bare name is too short to take
			bare = append(bare, h.Name)
		}
		for _, name := range h.Names {
			if name != h.Name && !inZones(name, c.Zones) {
				all = append(all, name)
			}
		}
	}
	var b strings.Builder
	b.WriteString("# Written by helix; changes are lost. Take it away with: helix ssh-config --uninstall\n")
	if len(bare) > 0 {
		fmt.Fprintf(&b, "Host %s\n    HostName %%h.%s\n\n", strings.Join(bare, " "), defaultZones(c.Zones)[0])
	}
	// A name with a quote in it would end the quotes around %h in the shell's line.
	fmt.Fprintf(&b, "Host %s %s\n", strings.Join(append(bare, all...), " "), `"!*'*"`)
	pass := " --pass-fd"
	if c.NoPassFD {
		pass = ""
	}
	fmt.Fprintf(&b, "    ProxyCommand %s proxy --state %s%s '%%h' %%p\n", percent(shellQuote(c.Helix)), percent(shellQuote(c.State)), pass)
	if !c.NoPassFD {
		b.WriteString("    ProxyUseFDPass yes\n")
	}
	b.WriteString("    User helix\n")
	if c.Identity != "" {
		fmt.Fprintf(&b, "    IdentityFile %s\n    IdentitiesOnly yes\n", configQuote(percent(c.Identity)))
	}
	fmt.Fprintf(&b, "    UserKnownHostsFile %s\n", configQuote(percent(c.KnownHosts)))
	b.WriteString(`    StrictHostKeyChecking yes
    CheckHostIP no
    UpdateHostKeys no
    VerifyHostKeyDNS no
    CanonicalizeHostname no
    ServerAliveInterval 15
    ServerAliveCountMax 3
`)
	return []byte(b.String()), nil
}

func inZones(name string, zones []string) bool {
	return slices.ContainsFunc(defaultZones(zones), func(zone string) bool { return strings.HasSuffix(name, "."+zone) })
}

// KnownHosts returns the text of the known hosts file: the host CA for every
// name and address, and each name's plain key for clients that do not speak
// certificates. The CA vouches only for names that a certificate spells out, so
// one workspace cannot pass for another.
func KnownHosts(ca ssh.PublicKey, zones []string, hosts []Host) []byte {
	var patterns []string
	for _, zone := range defaultZones(zones) {
		patterns = append(patterns, "*."+zone)
	}
	var plain strings.Builder
	for _, h := range hosts {
		for _, name := range h.Names {
			if !inZones(name, zones) {
				patterns = append(patterns, name)
			}
		}
		plain.WriteString(strings.Join(h.Names, ",") + " " + keyLine(h.Signer.PublicKey(), "") + "\n")
	}
	return []byte("@cert-authority " + strings.Join(patterns, ",") + " " + keyLine(ca, "helix host CA") + "\n" + plain.String())
}

// checkPath refuses what cannot be written in a configuration of ssh.
func checkPath(path string) error {
	refuse := func(why string) error {
		return &keyError{
			what: fmt.Sprintf("write path %q in ssh configuration", path), err: errors.New(why),
			hint: "use a state folder with a plainer name (--state)",
		}
	}
	switch {
	case !filepath.IsAbs(path):
		return refuse("it is not absolute")
	case strings.ContainsFunc(path, unicode.IsControl):
		return refuse("it has a control character")
	case strings.Contains(path, "${"):
		return refuse(`ssh takes "${" for a variable`)
	}
	return nil
}

// percent hides the percent signs of text from ssh's own expansion.
func percent(text string) string { return strings.ReplaceAll(text, "%", "%%") }

// configQuote makes text one argument of a line of ssh's configuration.
func configQuote(text string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(text) + `"`
}

// shellQuote makes text one word of a shell's line. The quotes are also balanced
// for ssh, which looks at the line first and takes a backslash before a quote
// for an escape even between single quotes.
func shellQuote(text string) string {
	return "'" + strings.NewReplacer("'", `'"'"'`, `\`, `'"\\"'`).Replace(text) + "'"
}
