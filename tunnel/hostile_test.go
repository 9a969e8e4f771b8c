package tunnel

import (
	"encoding/binary"
	"errors"
	"testing"

	"helix.local/helix/agent/wire"
)

func rawFrame(kind uint8, flags uint16, stream, length uint32, body ...byte) []byte {
	b := []byte{0, kind}
	b = binary.BigEndian.AppendUint16(b, flags)
	b = binary.BigEndian.AppendUint32(b, stream)
	b = binary.BigEndian.AppendUint32(b, length)
	return append(b, body...)
}

// What no agent of ours sends ends the session at the gateway, and nothing
// else.
func TestGatewayRefusesWhatAgentsDoNotSend(t *testing.T) {
	for name, bytes := range map[string][]byte{
		"a stream of its own":     rawFrame(typeWindow, flagSYN, 2, 0),
		"a stream twice":          rawFrame(typeData, flagSYN, 3, 1, 'x'),
		"ping":                    rawFrame(2, flagSYN, 0, 1),
		"go away":                 rawFrame(3, 0, 0, 0),
		"reset in the framing":    rawFrame(typeWindow, flagRST, 3, 0),
		"a huge body":             rawFrame(typeData, 0, 3, maxBody+1),
		"another version":         append([]byte{1}, rawFrame(typeData, 0, 3, 1, 'x')[1:]...),
		"end of control":          rawFrame(typeWindow, flagFIN, controlID, 0),
		"rubbish on control":      rawFrame(typeData, 0, controlID, 4, 0xff, 0xff, 0xff, 0xff),
		"an end twice":            append(rawFrame(typeWindow, flagFIN, 3, 0), rawFrame(typeWindow, flagFIN, 3, 0)...),
		"a mark of a serial port": testMark(markSync).append(nil),
	} {
		t.Run(name, func(t *testing.T) {
			a, b := sockets(t, "tcp")
			j := joinOver(t, a, b, Limits{}, Limits{})
			if _, err := b.Write(bytes); err != nil {
				t.Fatal(err)
			}
			<-j.gw.Done()
			if err := j.gw.Err(); !errors.Is(err, ErrProtocol) {
				t.Error(err)
			}
		})
	}
}

// More than the window on one stream, and data for streams that do not exist.
func TestGatewayBoundsWhatAgentsSend(t *testing.T) {
	a, b := sockets(t, "tcp")
	j := joinOver(t, a, b, Limits{}, Limits{})
	if _, err := b.Write(rawFrame(typeData, 0, 99, 3, 'x', 'y', 'z')); err != nil {
		t.Fatal(err)
	}
	if _, err := j.gw.Ping(t.Context()); err != nil {
		t.Errorf("data of no stream: %v", err)
	}
	body := make([]byte, maxBody)
	for range 17 {
		if _, err := b.Write(rawFrame(typeData, 0, j.gst.id, maxBody, body...)); err != nil {
			break // the gateway has had enough
		}
	}
	<-j.gw.Done()
	if err := j.gw.Err(); !errors.Is(err, ErrProtocol) {
		t.Error(err)
	}
}

// A peer that goes on sending on streams that were closed may not fill memory.
func TestGatewayBoundsClosedStreams(t *testing.T) {
	a, b := sockets(t, "tcp")
	j := joinOver(t, a, b, Limits{MaxUnread: 1 << 20}, Limits{})
	body := make([]byte, maxBody)
	for range 2 {
		st, _ := j.open(t)
		// The agent's session is not told, as if it did not care.
		j.gw.mu.Lock()
		st.dropLocked()
		j.gw.mu.Unlock()
		for range 10 {
			if _, err := b.Write(rawFrame(typeData, 0, st.id, maxBody, body...)); err != nil {
				break
			}
		}
	}
	<-j.gw.Done()
	if err := j.gw.Err(); !errors.Is(err, ErrProtocol) {
		t.Error(err)
	}
}

func TestAgentBoundsStreamsOfTheGateway(t *testing.T) {
	a, b := sockets(t, "tcp")
	_, ag := pair(t, a, b, Limits{}, Limits{MaxStreams: 1})
	for id := uint32(3); id < 3+2*(backlog+10); id += 2 {
		if _, err := a.Write(rawFrame(typeWindow, flagSYN, id, 0)); err != nil {
			break
		}
	}
	<-ag.Done()
	if err := ag.Err(); !errors.Is(err, ErrProtocol) {
		t.Error(err)
	}
}

// A stream that is reset before the agent has looked at it.
func TestResetBeforeTheAgentAccepts(t *testing.T) {
	a, b := sockets(t, "tcp")
	gw, ag := pair(t, a, b, Limits{}, Limits{})
	opened := make(chan error)
	go func() {
		_, err := gw.Open(t.Context(), wire.OpenRequest{Port: 1})
		opened <- err
	}()
	eventually(t, "stream known to the agent", func() bool { return ag.Stats().Streams == 1 })
	eventually(t, "stream known to the gateway", func() bool {
		gw.mu.Lock()
		defer gw.mu.Unlock()
		for _, st := range gw.streams {
			if st.mux != nil {
				st.resetLocked("test")
				return true
			}
		}
		return false
	})
	if err := <-opened; !errors.Is(err, ErrReset) {
		t.Error(err)
	}
	eventually(t, "reset known to the agent", func() bool { return ag.Stats().Resets == 1 })
	serve(t, ag, dialer)
	eventually(t, "no streams left", func() bool { return noStreams(gw) && noStreams(ag) })
}
