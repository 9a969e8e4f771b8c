//go:build linux || darwin

package session

import "golang.org/x/sys/unix"

// controlChars maps the opcodes of RFC 4254, section 8 to places in Cc.
var controlChars = map[uint8]int{
	1: unix.VINTR, 2: unix.VQUIT, 3: unix.VERASE, 4: unix.VKILL, 5: unix.VEOF, 6: unix.VEOL,
	7: unix.VEOL2, 8: unix.VSTART, 9: unix.VSTOP, 10: unix.VSUSP, 12: unix.VREPRINT,
	13: unix.VWERASE, 14: unix.VLNEXT, 18: unix.VDISCARD,
}

// modeFlag is what one opcode switches in a terminal's settings.
type modeFlag struct {
	field      func(*unix.Termios) *termFlags
	mask, bits termFlags
}

func input(bit termFlags) modeFlag   { return modeFlag{inputFlags, bit, bit} }
func local(bit termFlags) modeFlag   { return modeFlag{localFlags, bit, bit} }
func output(bit termFlags) modeFlag  { return modeFlag{outputFlags, bit, bit} }
func control(bit termFlags) modeFlag { return modeFlag{controlFlags, bit, bit} }

func inputFlags(t *unix.Termios) *termFlags   { return &t.Iflag }
func localFlags(t *unix.Termios) *termFlags   { return &t.Lflag }
func outputFlags(t *unix.Termios) *termFlags  { return &t.Oflag }
func controlFlags(t *unix.Termios) *termFlags { return &t.Cflag }

// modeFlags maps the other opcodes. Parity and character size (90 to 93) mean
// nothing on a pseudo-terminal, but programs read them back.
var modeFlags = map[uint8]modeFlag{
	30: input(unix.IGNPAR), 31: input(unix.PARMRK), 32: input(unix.INPCK), 33: input(unix.ISTRIP),
	34: input(unix.INLCR), 35: input(unix.IGNCR), 36: input(unix.ICRNL), 38: input(unix.IXON),
	39: input(unix.IXANY), 40: input(unix.IXOFF), 41: input(unix.IMAXBEL), 42: input(unix.IUTF8),
	50: local(unix.ISIG), 51: local(unix.ICANON), 53: local(unix.ECHO), 54: local(unix.ECHOE),
	55: local(unix.ECHOK), 56: local(unix.ECHONL), 57: local(unix.NOFLSH), 58: local(unix.TOSTOP),
	59: local(unix.IEXTEN), 60: local(unix.ECHOCTL), 61: local(unix.ECHOKE), 62: local(unix.PENDIN),
	70: output(unix.OPOST), 72: output(unix.ONLCR), 73: output(unix.OCRNL), 74: output(unix.ONOCR),
	75: output(unix.ONLRET),
	90: {controlFlags, unix.CSIZE, unix.CS7}, 91: {controlFlags, unix.CSIZE, unix.CS8},
	92: control(unix.PARENB), 93: control(unix.PARODD),
}
