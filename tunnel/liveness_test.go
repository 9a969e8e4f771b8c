package tunnel

import (
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

func TestVitals(t *testing.T) {
	const s = time.Second
	type step struct {
		p       pulse
		streams bool
		want    verdict
		wait    time.Duration
	}
	for name, steps := range map[string][]step{
		"busy link is left alone": {
			{pulse{now: 4 * s, lastIn: 4 * s}, true, fine, 2250 * time.Millisecond},
		},
		"black hole with streams: 14 s": {
			{pulse{now: 4 * s}, true, fine, s},
			{pulse{now: 5 * s}, true, ping, 2250 * time.Millisecond},
			{pulse{now: 7 * s}, true, fine, 2250 * time.Millisecond},
			{pulse{now: 9 * s}, true, fine, 2250 * time.Millisecond},
			{pulse{now: 11 * s}, true, fine, 2250 * time.Millisecond},
			{pulse{now: 13 * s}, true, fine, s},
			{pulse{now: 14 * s}, true, silent, 0},
		},
		"without streams it is not in a hurry": {
			{pulse{now: 19 * s}, false, fine, s},
			{pulse{now: 20 * s}, false, ping, 2250 * time.Millisecond},
		},
		"any byte is a sign of life": {
			{pulse{now: 5 * s}, true, ping, 2250 * time.Millisecond},
			{pulse{now: 7 * s, lastIn: 6 * s}, true, fine, 2250 * time.Millisecond},
			{pulse{now: 9 * s, lastIn: 6 * s}, true, fine, 2 * s},
			{pulse{now: 11 * s, lastIn: 6 * s}, true, ping, 2250 * time.Millisecond},
		},
		"stopped for minutes: ask again first": {
			{pulse{now: 5 * s}, true, ping, 2250 * time.Millisecond},
			{pulse{now: 125 * s}, true, ping, 2250 * time.Millisecond},
			{pulse{now: 127 * s, lastIn: 126 * s}, true, fine, 2250 * time.Millisecond},
		},
		"one who only hears must speak": {
			{pulse{now: 3 * s, lastIn: 3 * s, owed: 1 << 20}, true, beat, 2250 * time.Millisecond},
			{pulse{now: 5 * s, lastIn: 5 * s, lastOut: 4 * s, owed: 1 << 20}, true, fine, 2250 * time.Millisecond},
			{pulse{now: 7 * s, lastIn: 7 * s, lastOut: 4 * s, owed: 100}, true, fine, 2250 * time.Millisecond},
		},
	} {
		v := vitals{idle: 20 * s, active: 5 * s, dead: 9 * s}
		for i, st := range steps {
			if got, wait := v.check(st.p, st.streams); got != st.want || wait != st.wait {
				t.Errorf("%s: step %d: %v after %v, want %v after %v", name, i, got, wait, st.want, st.wait)
			}
		}
	}
}

// pipe forwards bytes between two connections until hole is called; then it
// swallows them, as a network that drops packets does.
type pipe struct {
	wg   sync.WaitGroup
	mu   sync.Mutex
	dark bool
}

func newPipe(t *testing.T) (p *pipe, a, b net.Conn) {
	t.Helper()
	p = &pipe{}
	a, x := sockets(t, "tcp")
	y, b := sockets(t, "tcp")
	for _, ends := range [][2]net.Conn{{x, y}, {y, x}} {
		p.wg.Go(func() {
			buf := make([]byte, 32<<10)
			for {
				n, err := ends[0].Read(buf)
				if err != nil {
					return
				}
				p.mu.Lock()
				dark := p.dark
				p.mu.Unlock()
				if !dark {
					_, _ = ends[1].Write(buf[:n])
				}
			}
		})
	}
	t.Cleanup(func() {
		_ = x.Close()
		_ = y.Close()
		p.wg.Wait()
	})
	return p, a, b
}

func (p *pipe) hole() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dark = true
}

func TestBlackHoleIsDetected(t *testing.T) {
	p, a, b := newPipe(t)
	fast := Limits{ProbeActive: 100 * time.Millisecond, ProbeIdle: 400 * time.Millisecond, Dead: 180 * time.Millisecond}
	j := joinOver(t, a, b, fast, fast)
	p.hole()
	start := time.Now()
	for _, st := range []*Stream{j.gst, j.ast} {
		if _, err := st.Read(make([]byte, 1)); !errors.Is(err, ErrClosed) || !errors.Is(err, ErrSilent) {
			t.Errorf("read: %v", err)
		}
	}
	<-j.gw.Done()
	<-j.ag.Done()
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("took %v", took)
	}
}

func TestIdleSessionLivesOnProbes(t *testing.T) {
	fast := Limits{ProbeActive: 20 * time.Millisecond, ProbeIdle: 20 * time.Millisecond, Dead: 5 * time.Second}
	a, b := sockets(t, "tcp")
	gw, ag := pair(t, a, b, fast, fast)
	was := ag.Stats().BytesIn
	eventually(t, "probes", func() bool { return ag.Stats().BytesIn > was+500 })
	if err := errors.Join(gw.Err(), ag.Err()); err != nil {
		t.Error(err)
	}
}

// A gateway that only sends must hear from the agent, though nothing in the
// agent answers.
func TestReceiverOfBulkSpeaks(t *testing.T) {
	a, b := sockets(t, "tcp")
	j := joinOver(t, a, b, Limits{}, Limits{ProbeActive: time.Hour, ProbeIdle: time.Hour, Dead: 40 * time.Millisecond})
	was := j.ag.Stats().BytesOut
	go func() { _, _ = io.Copy(io.Discard, j.ast) }()
	write(t, j.gst, string(make([]byte, 2*beatAfter)))
	eventually(t, "a beat", func() bool { return j.ag.Stats().BytesOut > was })
}
