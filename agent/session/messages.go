package session

import (
	"errors"
	"fmt"
	"syscall"

	gossh "golang.org/x/crypto/ssh"
)

// The payloads of RFC 4254 and of OpenSSH's PROTOCOL document that the server
// reads or writes; fields in wire order.
type (
	directTCP struct { // direct-tcpip (7.2) and forwarded-tcpip
		Host       string
		Port       uint32
		OriginHost string
		OriginPort uint32
	}
	directUnix struct { // direct-streamlocal@openssh.com
		Path     string
		Reserved string
		Unused   uint32
	}
	forwardedUnix struct { // forwarded-streamlocal@openssh.com
		Path     string
		Reserved string
	}
	forwardTCP struct { // tcpip-forward (7.1)
		Host string
		Port uint32
	}
	ptyPayload struct { // pty-req (6.2)
		Term                         string
		Columns, Rows, Width, Height uint32
		Modes                        string
	}
	windowPayload struct { // window-change (6.7)
		Columns, Rows, Width, Height uint32
	}
	envPayload  struct{ Name, Value string } // env (6.4)
	textPayload struct{ Text string }        // exec, subsystem (6.5), signal (6.9)
	exitStatus  struct{ Status uint32 }      // exit-status (6.10)
	exitSignal  struct {                     // exit-signal (6.10)
		Signal   string
		Core     bool
		Message  string
		Language string
	}
)

var errPayload = errors.New("malformed payload")

// parsePort checks a port number that came as 32 bits.
func parsePort(port uint32) (uint16, error) {
	if port > 65535 {
		return 0, fmt.Errorf("port %d: out of range", port)
	}
	return uint16(port), nil
}

// terminal is what a pty-req asks for.
type terminal struct {
	term  string
	size  windowPayload
	modes []mode
}

// mode is one encoded terminal mode of RFC 4254, section 8.
type mode struct {
	op    uint8
	value uint32
}

// parsePTY reads a pty-req. Sizes that no terminal has are cut to what the
// kernel can hold.
func parsePTY(payload []byte) (terminal, error) {
	var p ptyPayload
	if err := gossh.Unmarshal(payload, &p); err != nil {
		return terminal{}, errPayload
	}
	for _, c := range []byte(p.Term) {
		if c == 0 {
			return terminal{}, errPayload
		}
	}
	return terminal{
		term:  p.Term,
		size:  windowPayload{p.Columns, p.Rows, p.Width, p.Height},
		modes: parseModes([]byte(p.Modes)),
	}, nil
}

// parseModes reads modes up to TTY_OP_END, an opcode without a defined
// argument (160 and above), or a cut argument.
func parseModes(b []byte) []mode {
	var modes []mode
	for len(b) >= 5 && b[0] != 0 && b[0] < 160 {
		modes = append(modes, mode{b[0], uint32(b[1])<<24 | uint32(b[2])<<16 | uint32(b[3])<<8 | uint32(b[4])})
		b = b[5:]
	}
	return modes
}

// signals are those that RFC 4254, section 6.10 names.
func signalNumber(name string) (syscall.Signal, bool) {
	for _, s := range signalNames {
		if s.name == name {
			return s.number, true
		}
	}
	return 0, false
}

func signalName(number syscall.Signal) string {
	for _, s := range signalNames {
		if s.number == number {
			return s.name
		}
	}
	return fmt.Sprintf("SIG%d@helix.local", int(number)) // section 6.10: own names carry a domain
}
