package tunnel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/yamux"

	"helix.local/helix/agent/wire"
)

type side uint8

const (
	gatewaySide side = iota // opens streams; yamux client
	agentSide               // answers them; yamux server
)

const (
	// backlog bounds opens that the peer has not seen yet; both ends use it.
	backlog = 1024

	// writeTimeout is yamux's per-send limit, which would end the session on a
	// slow link. Liveness judges that instead.
	writeTimeout = 365 * 24 * time.Hour

	byeTimeout = time.Second // for the last words on a stalled link

	controlID = 1 // yamux's first stream of the client
)

// Session is one authenticated connection between gateway and agent. Its
// methods may be called concurrently.
type Session struct {
	side   side
	terms  terms
	limits Limits
	log    *slog.Logger
	start  time.Time
	link   *link
	mux    *yamux.Session
	ctl    *yamux.Stream

	dying chan struct{} // closed when err is set
	done  chan struct{} // closed when every goroutine of the session has ended
	wg    sync.WaitGroup

	queue   chan struct{}          // says that out is not empty; holds one token
	muxSaid atomic.Pointer[string] // yamux's own last error
	linkErr atomic.Pointer[error]  // the link's first

	// mu guards all below, and the fields of streams that say so. It is held
	// for memory only: what must happen outside is left in after.
	mu       sync.Mutex
	err      error
	streams  map[uint32]*Stream // opened and not finished both ways
	opening  int                // opens that have no stream yet
	live     int                // unread bytes that somebody may still read
	zombie   int                // unread bytes of streams that were ended here
	drained  chan struct{}      // set by drain; closed when no stream is left
	out      []action           // for the control writer
	pings    map[uint64]chan struct{}
	pingID   uint64
	pongs    int // pongs in out
	after    []func()
	opened   uint64
	resets   uint64
	rtt      time.Duration
	byeCause error
}

// Stats is a session's account since it began.
type Stats struct {
	Streams   int           // open now
	Opened    uint64        // streams ever
	Resets    uint64        // of them reset, by either end
	Unread    int           // bytes received and not read
	BytesIn   uint64        // on the link, framing included
	BytesOut  uint64        // the same, sent
	RTT       time.Duration // of the last ping; 0 before the first
	LastHeard time.Duration // since the last byte from the peer
}

func newSession(conn net.Conn, who side, t terms, limits Limits, log *slog.Logger) (*Session, error) {
	s := &Session{
		side: who, terms: t, limits: limits, start: time.Now(),
		log:     log.With("session", t.welcome.Session, "target", t.intro.Target, "link", t.intro.Link),
		dying:   make(chan struct{}),
		done:    make(chan struct{}),
		queue:   make(chan struct{}, 1),
		streams: map[uint32]*Stream{},
		pings:   map[uint64]chan struct{}{},
	}
	s.link = newLink(conn, func() time.Duration { return time.Since(s.start) })
	s.link.inbound, s.link.outbound, s.link.failed = s.inbound, s.outbound, s.linkFailed
	cfg := &yamux.Config{
		AcceptBacklog: backlog, KeepAliveInterval: time.Hour, ConnectionWriteTimeout: writeTimeout,
		MaxStreamWindowSize: uint32(limits.Window), Logger: muxLog{s},
	}
	var err error
	if who == gatewaySide {
		if s.mux, err = yamux.Client(s.link, cfg); err == nil {
			s.ctl, err = s.mux.OpenStream()
		}
	} else {
		if s.mux, err = yamux.Server(s.link, cfg); err == nil {
			s.ctl, err = s.mux.AcceptStream()
		}
	}
	if err == nil && s.ctl.StreamID() != controlID {
		err = fmt.Errorf("control stream has number %d: %w", s.ctl.StreamID(), ErrProtocol)
	}
	if err != nil {
		s.die(fmt.Errorf("open control stream: %w", err))
		if s.mux != nil {
			err = errors.Join(s.Err(), s.mux.Close())
		}
		return nil, err
	}
	s.wg.Go(s.readControl)
	s.wg.Go(s.writeControl)
	go s.run() // ends with the session; done says when
	return s, nil
}

// run watches the session's life and ends it in order.
func (s *Session) run() {
	defer close(s.done)
	s.watch()
	<-s.dying // if yamux ended, the control reader says why
	if err := s.mux.Close(); err != nil {
		s.log.Debug("close mux", "err", err)
	}
	s.wg.Wait()
	s.log.Debug("session ended", "err", s.Err())
}

// watch returns when the session is to end.
func (s *Session) watch() {
	v := vitals{idle: s.limits.ProbeIdle, active: s.limits.ProbeActive, dead: s.limits.Dead}
	s.sendPing(nil) // carries the opening of the control stream too
	timer := time.NewTimer(min(v.active/2, v.dead/4))
	defer timer.Stop()
	for {
		select {
		case <-s.mux.CloseChan():
			return
		case <-s.dying:
			return
		case <-timer.C:
		}
		s.mu.Lock()
		busy := len(s.streams)+s.opening > 0
		s.mu.Unlock()
		what, wait := v.check(s.link.pulse(), busy)
		switch what {
		case fine:
		case ping:
			s.sendPing(nil)
		case beat:
			s.send(action{frame: wire.Control{Kind: wire.ControlPong}})
		case silent:
			s.die(fmt.Errorf("nothing heard for %v: %w", s.limits.Dead, ErrSilent))
			return
		}
		timer.Reset(wait)
	}
}

// unlock releases mu and then does what was left to do without it.
func (s *Session) unlock() {
	after := s.after
	s.after = nil
	s.mu.Unlock()
	for _, f := range after {
		f()
	}
}

// linkFailed notes why yamux is about to end. The session dies of it only when
// the control frames that came before are read: one may be a bye.
func (s *Session) linkFailed(err error) { s.linkErr.CompareAndSwap(nil, &err) }

// die ends the session for cause; the first cause stays. It may be called from
// anywhere, also from below yamux, and does not wait.
func (s *Session) die(cause error) {
	s.mu.Lock()
	if s.err != nil {
		s.mu.Unlock()
		return
	}
	if s.byeCause != nil {
		cause = s.byeCause
	}
	if err := s.linkErr.Load(); err != nil && cause == nil {
		cause = *err
	}
	if said := s.muxSaid.Load(); said != nil && cause == nil {
		cause = fmt.Errorf("%s: %w", *said, ErrProtocol)
	}
	if cause == nil || errors.Is(cause, io.EOF) {
		cause = errors.New("the peer closed the link")
	}
	s.err = fmt.Errorf("%w: %w", ErrClosed, cause)
	for _, st := range s.streams {
		st.failLocked(s.err)
	}
	close(s.dying)
	s.unlock()
	if err := s.link.Conn.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		s.log.Debug("close link", "err", err)
	}
}

// Open asks the agent for a stream to what req names and waits for its answer.
// Besides *OpenError it fails with ErrDraining, ErrTooManyStreams, ErrClosed,
// or ctx's error; the stream is then given up at both ends.
func (s *Session) Open(ctx context.Context, req wire.OpenRequest) (*Stream, error) {
	if s.side != gatewaySide {
		return nil, fmt.Errorf("open %s: only the gateway opens streams: %w", describe(req), ErrDenied)
	}
	if err := s.beginOpen(); err != nil {
		return nil, fmt.Errorf("open %s: %w", describe(req), err)
	}
	// yamux's open takes no context, so it waits in a goroutine of the session.
	type result struct {
		st  *Stream
		err error
	}
	opened := make(chan result)
	go func() {
		defer s.wg.Done()
		st, err := s.openStream(req)
		select {
		case opened <- result{st, err}:
		case <-ctx.Done():
			if st != nil {
				st.abort("open given up")
			}
		}
	}()
	var r result
	select {
	case r = <-opened:
	case <-ctx.Done():
		return nil, fmt.Errorf("open %s: %w", describe(req), context.Cause(ctx))
	}
	if r.err != nil {
		return nil, fmt.Errorf("open %s: %w", describe(req), r.err)
	}
	if err := r.st.readReply(ctx, req); err != nil {
		return nil, err
	}
	return r.st, nil
}

func (s *Session) beginOpen() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.err != nil:
		return s.err
	case s.drained != nil:
		return ErrDraining
	case len(s.streams)+s.opening >= s.limits.MaxStreams:
		return fmt.Errorf("%d open: %w", len(s.streams)+s.opening, ErrTooManyStreams)
	}
	s.opening++
	s.wg.Add(1)
	return nil
}

func (s *Session) openStream(req wire.OpenRequest) (*Stream, error) {
	ys, err := s.mux.OpenStream()
	s.mu.Lock()
	s.opening--
	s.idleLocked()
	s.mu.Unlock()
	if err != nil {
		if errors.Is(err, yamux.ErrStreamsExhausted) {
			s.die(err)
		}
		return nil, s.lost()
	}
	st := s.attach(ys)
	if st == nil {
		return nil, s.lost()
	}
	if err := wire.WriteFrame(st, req); err != nil {
		st.abort("open failed")
		return nil, err
	}
	return st, nil
}

// lost is the session's error when yamux has ended.
func (s *Session) lost() error {
	if !s.mux.IsClosed() {
		s.die(fmt.Errorf("a stream ended without a reason: %w", ErrProtocol))
	}
	<-s.dying
	return s.Err()
}

// Drain tells the peer that no new streams are wanted and waits until the last
// one has ended, or ctx has. It leaves the session open for Close.
func (s *Session) Drain(ctx context.Context, reason string) error {
	s.mu.Lock()
	if s.drained == nil {
		s.drainLocked()
	}
	s.sendLocked(action{frame: wire.Control{Kind: wire.ControlDrain, Reason: plain(reason)}})
	drained := s.drained
	s.unlock()
	select {
	case <-drained:
		return nil
	case <-s.dying:
		return fmt.Errorf("drain: %w", s.Err())
	case <-ctx.Done():
		return fmt.Errorf("drain: %d streams open: %w", s.Stats().Streams, context.Cause(ctx))
	}
}

func (s *Session) drainLocked() {
	s.drained = make(chan struct{})
	s.idleLocked()
}

// idleLocked tells Drain when nothing is open; mu is held.
func (s *Session) idleLocked() {
	if s.drained == nil || len(s.streams)+s.opening > 0 {
		return
	}
	select {
	case <-s.drained:
	default:
		close(s.drained)
	}
}

// Close says bye and ends the session; open streams end in an error at both
// ends. It returns when all goroutines of the session have ended.
func (s *Session) Close() error {
	said := make(chan struct{})
	s.send(action{frame: wire.Control{Kind: wire.ControlBye, Reason: "closed by the " + s.side.String()}, sent: said})
	timer := time.NewTimer(byeTimeout)
	defer timer.Stop()
	select {
	case <-said:
	case <-s.dying:
	case <-timer.C:
	}
	s.die(errors.New("closed here"))
	<-s.done
	return nil
}

func (w side) String() string {
	if w == agentSide {
		return "agent"
	}
	return "gateway"
}

// Done is closed when the session has ended and none of its goroutines is left.
func (s *Session) Done() <-chan struct{} { return s.done }

// Err is nil while the session lives, then ErrClosed with the cause.
func (s *Session) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// Name is the session's name in logs, given by the gateway.
func (s *Session) Name() string { return s.terms.welcome.Session }

// Link is the kind of the transport below, as the agent introduced it.
func (s *Session) Link() string { return s.terms.intro.Link }

// Intro is the agent's introduction, without the token.
func (s *Session) Intro() wire.Introduction { return s.terms.intro }

// Epoch grows with each session of the target: of two, the higher is current.
func (s *Session) Epoch() uint64 { return s.terms.welcome.Epoch }

// GatewayTime is the gateway's clock now, late by the time the welcome took on
// the way. It does not depend on the local wall clock.
func (s *Session) GatewayTime() time.Time {
	return s.terms.welcome.Time.Add(time.Since(s.terms.at))
}

// Stats returns the session's account.
func (s *Session) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return Stats{
		Streams: len(s.streams), Opened: s.opened, Resets: s.resets, Unread: s.live + s.zombie,
		BytesIn: s.link.in.Load(), BytesOut: s.link.out.Load(), RTT: s.rtt,
		LastHeard: s.link.now() - time.Duration(s.link.lastIn.Load()),
	}
}

// muxLog is yamux's logger: its words go to Debug, and its errors are kept
// because yamux tells the cause of its end nowhere else.
type muxLog struct{ s *Session }

func (l muxLog) Print(v ...any)   { l.say(fmt.Sprint(v...)) }
func (l muxLog) Println(v ...any) { l.say(fmt.Sprint(v...)) }
func (l muxLog) Printf(format string, v ...any) {
	l.say(fmt.Sprintf(format, v...))
}

func (l muxLog) say(text string) {
	if rest, ok := strings.CutPrefix(text, "[ERR] yamux: "); ok {
		l.s.muxSaid.Store(&rest)
	}
	l.s.log.Debug("mux says", "text", text)
}
