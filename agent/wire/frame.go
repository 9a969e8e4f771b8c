// Package wire holds the frames that a gateway and an agent exchange, and the
// JSON bodies of the agent's HTTP API.
//
// A frame is a 32-bit big-endian length followed by that many bytes of JSON. It
// is used where a connection starts (the handshake of a session, the request
// that opens a stream) and on a session's control stream; what follows a
// stream's open reply is raw bytes. Sizes are in bytes.
package wire

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// Version is the protocol version this program speaks, MinVersion the oldest
// it still understands.
const (
	Version    = 1
	MinVersion = 1
)

// MaxFrame bounds the JSON of one frame.
const MaxFrame = 64 << 10

// ErrFrameSize reports a frame that is empty or larger than MaxFrame.
var ErrFrameSize = errors.New("frame size out of range")

// WriteFrame writes v as one frame in a single Write.
func WriteFrame(w io.Writer, v any) error {
	body, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode frame: %w", err)
	}
	if len(body) > MaxFrame {
		return fmt.Errorf("write frame of %d bytes: %w", len(body), ErrFrameSize)
	}
	frame := make([]byte, 4, 4+len(body))
	binary.BigEndian.PutUint32(frame, uint32(len(body)))
	if _, err := w.Write(append(frame, body...)); err != nil {
		return fmt.Errorf("write frame: %w", err)
	}
	return nil
}

// ReadFrame reads one frame into v. It returns io.EOF when r ends before the
// first byte, and reads nothing beyond the frame.
func ReadFrame(r io.Reader, v any) error {
	var size [4]byte
	if _, err := io.ReadFull(r, size[:]); err != nil {
		if errors.Is(err, io.EOF) {
			return io.EOF
		}
		return fmt.Errorf("read frame: %w", err)
	}
	n := binary.BigEndian.Uint32(size[:])
	if n == 0 || n > MaxFrame {
		return fmt.Errorf("read frame of %d bytes: %w", n, ErrFrameSize)
	}
	body := make([]byte, n)
	if _, err := io.ReadFull(r, body); err != nil {
		return fmt.Errorf("read frame: %w", noEOF(err))
	}
	if err := json.Unmarshal(body, v); err != nil {
		return fmt.Errorf("decode frame: %w", err)
	}
	return nil
}

// noEOF turns an end in the middle of a frame into an error that cannot be
// mistaken for a clean end.
func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
