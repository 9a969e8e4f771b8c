package tunnel

import "time"

// vitals judges whether the peer lives, by any inbound byte. All times are
// since the session's start.
//
// Each side also breaks its own silence while it hears the other: a sender of
// bulk over a slow link may otherwise hear nothing until its probe has crawled
// through the full buffers in front of it.
type vitals struct {
	idle, active, dead time.Duration // Limits
	probe              time.Duration // when the outstanding probe was sent; 0 none
	due                time.Duration // when check asked to be called again
}

// verdict is what check wants done.
type verdict uint8

const (
	fine   verdict = iota
	ping           // ask the peer for a byte
	beat           // send the peer a byte
	silent         // end the session
)

// pulse is what the link knows, at one moment.
type pulse struct {
	now, lastIn, lastOut time.Duration
	owed                 uint64 // bytes in since the last byte out
}

// beatAfter keeps the beats of two idle ends from answering each other.
const beatAfter = 16 << 10

// late is how far behind its time a check may run. Later means that this
// program was stopped, and what the peer said meanwhile is not read yet.
const late = time.Second

func (v *vitals) check(p pulse, streams bool) (verdict, time.Duration) {
	now, lastIn := p.now, p.lastIn
	limit := v.idle
	if streams {
		limit = v.active
	}
	stopped := v.due > 0 && now > v.due+late
	if v.probe > 0 && (lastIn > v.probe || stopped) {
		v.probe = 0
	}
	what, next := fine, lastIn+limit
	switch {
	case v.probe > 0 && now >= v.probe+v.dead:
		return silent, 0
	case v.probe > 0:
		next = v.probe + v.dead
	case now >= next:
		what, v.probe, next = ping, now, now+v.dead
	case p.owed >= beatAfter && now >= p.lastOut+v.dead/4:
		what = beat
	}
	// The state changes without waking the timer: look again soon enough.
	wait := min(next-now, v.active/2, v.dead/4)
	wait = max(wait, time.Millisecond)
	v.due = now + wait
	return what, wait
}
