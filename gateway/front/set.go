package front

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"
)

// Role is what a listener is for; the package itself knows RoleSSH only.
type Role string

// The roles.
const (
	RoleSSH   Role = "ssh"
	RoleHTTP  Role = "http"
	RoleHTTPS Role = "https"
	RolePort  Role = "port" // a port that a program in the workspace listens on
)

// Local is the listener that a connection came through.
type Local struct {
	Wanted netip.AddrPort // as given to Open: what the connection means
	Role   Role
}

// Handler serves one connection. It closes c, or hands it to somebody who
// does, before it returns, and it returns soon after ctx is done.
type Handler func(ctx context.Context, c *net.TCPConn, local Local)

// Config is what a Set needs.
type Config struct {
	// Handle serves the connections, each in a goroutine of its own.
	Handle Handler
	// Grace is how long connections may go on after Run's context ends; 0 = none.
	Grace time.Duration
	Log   *slog.Logger // nil = none
}

// Conns says what becomes of the connections of a listener that is closed.
type Conns uint8

// The choices.
const (
	KeepConns  Conns = iota // they end by themselves
	ResetConns              // they are reset
)

// Errors of a Set.
var (
	ErrClosed  = errors.New("listeners are shut down")
	ErrIsOpen  = errors.New("listener is open already")
	ErrNotOpen = errors.New("listener is not open")
)

// Set is the gateway's TCP listeners. Its methods may be called concurrently;
// listeners opened before Run accept once it runs.
type Set struct {
	cfg Config

	mu        sync.Mutex
	listeners map[netip.AddrPort]*listener // by wanted address
	start     func(*listener)              // nil before Run
	closed    bool
	conns     map[*net.TCPConn]served // those whose handlers run
}

// served is a connection with its handler.
type served struct {
	from   *listener
	cancel context.CancelFunc
}

type listener struct {
	*net.TCPListener
	local Local
	done  chan struct{} // closed when no Accept is pending any more
	once  sync.Once
}

// New makes an empty Set.
func New(cfg Config) *Set {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Set{cfg: cfg, listeners: map[netip.AddrPort]*listener{}, conns: map[*net.TCPConn]served{}}
}

// Open listens on addr, or on the fallback port of its address as [Bind] does.
func (s *Set) Open(ctx context.Context, addr netip.AddrPort, role Role, fallback uint16) (Result, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return Result{}, fmt.Errorf("open %s: %w", addr, ErrClosed)
	}
	if _, ok := s.listeners[addr]; ok {
		return Result{}, fmt.Errorf("open %s: %w", addr, ErrIsOpen)
	}
	ln, res, err := Bind(ctx, addr, fallback)
	if err != nil {
		return res, err
	}
	l := &listener{TCPListener: ln, local: Local{addr, role}, done: make(chan struct{})}
	s.listeners[addr] = l
	if s.start != nil {
		s.start(l)
	}
	return res, nil
}

// Close ends the listener that was opened for addr.
func (s *Set) Close(addr netip.AddrPort, conns Conns) error {
	s.mu.Lock()
	l, ok := s.listeners[addr]
	delete(s.listeners, addr)
	running := s.start != nil
	s.mu.Unlock()
	if !ok {
		return fmt.Errorf("close %s: %w", addr, ErrNotOpen)
	}
	err := l.close()
	if running {
		<-l.done
	}
	if conns == ResetConns {
		err = errors.Join(err, s.reset(l))
	}
	if err != nil {
		return fmt.Errorf("close %s: %w", addr, err)
	}
	return nil
}

// Run accepts until ctx is done, then closes all listeners, gives the
// connections the grace time, resets the rest and waits for their handlers.
func (s *Set) Run(ctx context.Context) error {
	// Handlers outlive ctx by the grace time.
	handlers, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	var accepting, serving sync.WaitGroup
	s.mu.Lock()
	s.start = func(l *listener) {
		accepting.Go(func() { s.accept(handlers, l, &serving) })
	}
	for _, l := range s.listeners {
		s.start(l)
	}
	s.mu.Unlock()

	<-ctx.Done()
	s.mu.Lock()
	s.closed = true
	var errs []error
	for _, l := range s.listeners {
		errs = append(errs, l.close())
	}
	s.mu.Unlock()
	accepting.Wait()
	ended := make(chan struct{})
	go func() { serving.Wait(); close(ended) }() // ends with the handlers, which Run waits for below
	timer := time.NewTimer(s.cfg.Grace)
	defer timer.Stop()
	select {
	case <-ended:
	case <-timer.C:
		cancel()
		errs = append(errs, s.reset(nil))
		<-ended
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("stop listeners: %w", err)
	}
	return nil
}

// accept is the goroutine of one listener.
func (s *Set) accept(ctx context.Context, l *listener, serving *sync.WaitGroup) {
	defer close(l.done)
	for {
		c, err := l.AcceptTCP()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			// Out of descriptors, most likely. The kernel queues what comes;
			// connections that end give descriptors back.
			s.cfg.Log.WarnContext(ctx, "accept", "listener", l.local.Wanted.String(), "err", err)
			if !pause(ctx, 50*time.Millisecond) {
				return
			}
			continue
		}
		connCtx, cancel := context.WithCancel(ctx)
		s.mu.Lock()
		s.conns[c] = served{l, cancel}
		s.mu.Unlock()
		serving.Go(func() {
			defer s.forget(c)
			s.cfg.Handle(connCtx, c, l.local)
		})
	}
}

// pause waits for d and reports whether ctx is still alive.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

func (l *listener) close() error {
	var err error
	l.once.Do(func() { err = l.TCPListener.Close() })
	return err
}

func (s *Set) forget(c *net.TCPConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conns[c].cancel()
	delete(s.conns, c)
}

// reset ends the connections that came through l and are still with their
// handlers; nil means all.
func (s *Set) reset(l *listener) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	for c, h := range s.conns {
		if l != nil && h.from != l {
			continue
		}
		h.cancel()
		if err := Reset(c); err != nil && !errors.Is(err, net.ErrClosed) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
