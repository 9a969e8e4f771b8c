package session

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"runtime"
	"strings"

	gossh "golang.org/x/crypto/ssh"
	"golang.org/x/sys/cpu"
)

const (
	serverVersion  = "SSH-2.0-Helix"
	maxVersionLine = 255 // RFC 4253, section 4.2
)

// peekVersion exchanges version lines, which is where the client says who it
// is, and gives back the connection as if nothing had been read, along with the
// ciphers to offer. Client order decides in SSH, and OpenSSH before version 10
// puts ChaCha20 and AES-CTR before AES-GCM, which is the fastest here wherever
// the CPU has AES. So OpenSSH, which always knows GCM, is offered nothing else
// then; others see the usual list (nil).
func peekVersion(nc net.Conn) (net.Conn, []string, error) {
	if _, err := nc.Write([]byte(serverVersion + "\r\n")); err != nil {
		return nil, nil, fmt.Errorf("announce version: %w", err)
	}
	var read []byte
	chunk := make([]byte, 1024)
	for {
		n, err := nc.Read(chunk)
		read = append(read, chunk[:n]...)
		line, _, whole := bytes.Cut(read, []byte{'\n'})
		switch {
		case len(line) >= maxVersionLine:
			return nil, nil, errors.New("read client version: line too long")
		case whole:
			return &versioned{Conn: nc, read: read}, ciphersFor(string(line), hasAES()), nil
		case err != nil:
			return nil, nil, fmt.Errorf("read client version: %w", err)
		}
	}
}

func ciphersFor(version string, aes bool) []string {
	if aes && strings.HasPrefix(version, "SSH-2.0-OpenSSH_") {
		return []string{gossh.CipherAES128GCM, gossh.CipherAES256GCM}
	}
	return nil
}

func hasAES() bool {
	switch runtime.GOARCH {
	case "amd64":
		return cpu.X86.HasAES && cpu.X86.HasPCLMULQDQ
	case "arm64":
		return cpu.ARM64.HasAES && cpu.ARM64.HasPMULL || runtime.GOOS == "darwin"
	}
	return false
}

// versioned replays what was read with the client's version line and swallows
// our own line, which is sent already.
type versioned struct {
	net.Conn
	read      []byte // what is still to be replayed; reads come from one goroutine
	announced bool   // writes come from one goroutine until keys are exchanged
}

func (c *versioned) Read(p []byte) (int, error) {
	if len(c.read) > 0 {
		n := copy(p, c.read)
		c.read = c.read[n:]
		return n, nil
	}
	return c.Conn.Read(p) //nolint:wrapcheck // transparent
}

func (c *versioned) Write(p []byte) (int, error) {
	if !c.announced && string(p) == serverVersion+"\r\n" {
		c.announced = true
		return len(p), nil
	}
	c.announced = true
	return c.Conn.Write(p) //nolint:wrapcheck // transparent
}
