package wire

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"
)

func TestFrameRoundTrip(t *testing.T) {
	var buf bytes.Buffer
	sent := []OpenRequest{{Service: ServiceSSH}, {Port: 5432}, {Unix: "/run/x y"}}
	for _, r := range sent {
		if err := WriteFrame(&buf, r); err != nil {
			t.Fatal(err)
		}
	}
	buf.WriteString("raw bytes of the stream")
	for _, want := range sent {
		var got OpenRequest
		if err := ReadFrame(iotest.OneByteReader(&buf), &got); err != nil || got != want {
			t.Errorf("got %+v, want %+v: %v", got, want, err)
		}
	}
	if rest := buf.String(); rest != "raw bytes of the stream" {
		t.Errorf("read beyond the frames: left %q", rest)
	}
}

// oneWrite fails the second time.
type oneWrite struct{ calls int }

func (w *oneWrite) Write(p []byte) (int, error) {
	w.calls++
	if w.calls > 1 {
		return 0, errors.New("second write")
	}
	return len(p), nil
}

func TestFrameIsOneWrite(t *testing.T) {
	w := &oneWrite{}
	if err := WriteFrame(w, OpenReply{Status: StatusOK}); err != nil {
		t.Error(err)
	}
	if err := WriteFrame(w, OpenReply{}); err == nil || !strings.Contains(err.Error(), "write frame: second write") {
		t.Error(err)
	}
}

func TestFrameFaults(t *testing.T) {
	size := func(n uint32) string { return string(binary.BigEndian.AppendUint32(nil, n)) }
	for name, c := range map[string]struct {
		in   string
		want error
	}{
		"nothing":      {"", io.EOF},
		"part of size": {"\x00\x00", io.ErrUnexpectedEOF},
		"no body":      {size(4), io.ErrUnexpectedEOF},
		"part of body": {size(4) + "{}", io.ErrUnexpectedEOF},
		"empty":        {size(0) + "{}", ErrFrameSize},
		"huge":         {size(1 << 31), ErrFrameSize},
		"just too big": {size(MaxFrame + 1), ErrFrameSize},
		"not JSON":     {size(2) + "{!", nil},
		"wrong type":   {size(13) + `{"port":"no"}`, nil},
		"port too big": {size(14) + `{"port":70000}`, nil},
	} {
		var r OpenRequest
		err := ReadFrame(strings.NewReader(c.in), &r)
		if err == nil || c.want != nil && !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
		if name != "nothing" && errors.Is(err, io.EOF) {
			t.Errorf("%s: looks like a clean end", name)
		}
	}
	if err := WriteFrame(io.Discard, strings.Repeat("x", MaxFrame)); !errors.Is(err, ErrFrameSize) {
		t.Errorf("write of too much: %v", err)
	}
	if err := WriteFrame(io.Discard, func() {}); err == nil {
		t.Error("wrote what has no JSON")
	}
}

func FuzzReadFrame(f *testing.F) {
	for _, v := range []any{
		Hello{Version: 1, Nonce: []byte("n")}, OpenRequest{Port: 80}, Control{Kind: ControlReset, Stream: 3, Reason: "é\x00"}, Introduction{Token: "t"},
	} {
		var buf bytes.Buffer
		if err := WriteFrame(&buf, v); err != nil {
			f.Fatal(err)
		}
		f.Add(buf.Bytes())
		f.Add(buf.Bytes()[:buf.Len()-1])
	}
	f.Add([]byte{0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, in []byte) {
		for _, v := range []any{&Hello{}, &Introduction{}, &Welcome{}, &OpenRequest{}, &OpenReply{}, &Control{}, &Boot{}} {
			r := bytes.NewReader(in)
			if ReadFrame(r, v) != nil {
				continue
			}
			first, err := json.Marshal(v)
			if err != nil {
				t.Fatal(err)
			}
			var buf bytes.Buffer
			if err := WriteFrame(&buf, v); err != nil {
				if errors.Is(err, ErrFrameSize) { // escapes may make it longer than it came
					continue
				}
				t.Fatal(err)
			}
			if err := ReadFrame(&buf, v); err != nil {
				t.Fatal(err)
			}
			if second, err := json.Marshal(v); err != nil || !bytes.Equal(first, second) {
				t.Fatalf("%T: %s became %s: %v", v, first, second, err)
			}
		}
	})
}
