package vmctl

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/digitalocean/go-qemu/qmp"
)

// monitor is the connection to QEMU's machine protocol. Its goroutine ends when
// the connection does; close waits for it.
type monitor struct {
	qmp  *qmp.SocketMonitor
	done sync.WaitGroup

	mu sync.Mutex // serialises commands

	reasonMu sync.Mutex
	why      string // reason of the first SHUTDOWN event
}

// connectMonitor connects as soon as QEMU listens. It gives up when ctx ends.
func connectMonitor(ctx context.Context, path string) (*monitor, error) {
	retry := time.NewTicker(5 * time.Millisecond)
	defer retry.Stop()
	for {
		m, err := qmp.NewSocketMonitor("unix", path, time.Second)
		if err == nil {
			return handshake(ctx, m)
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("connect to the monitor: %w (%w)", context.Cause(ctx), err)
		case <-retry.C:
		}
	}
}

func handshake(ctx context.Context, q *qmp.SocketMonitor) (*monitor, error) {
	// The library knows no context; closing is what interrupts it.
	stop := context.AfterFunc(ctx, func() { _ = q.Disconnect() })
	err := q.Connect()
	if !stop() {
		err = context.Cause(ctx)
	}
	if err != nil {
		_ = q.Disconnect() // it never became usable
		return nil, fmt.Errorf("greet the monitor: %w", err)
	}
	m := &monitor{qmp: q}
	events, err := q.Events(ctx)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("listen to the monitor: %w", err), q.Disconnect())
	}
	m.done.Go(func() {
		for e := range events {
			if e.Event != "SHUTDOWN" {
				continue
			}
			reason, _ := e.Data["reason"].(string)
			m.reasonMu.Lock()
			if m.why == "" { // the first is the cause
				m.why = reason
			}
			m.reasonMu.Unlock()
		}
	})
	return m, nil
}

// run executes one command. When ctx ends first the connection is closed, since
// an answer that comes late would be taken for the next one's.
func (m *monitor) run(ctx context.Context, command string, args, result any) error {
	request, err := json.Marshal(struct {
		Execute   string `json:"execute"`
		Arguments any    `json:"arguments,omitempty"`
	}{command, args})
	if err != nil {
		return fmt.Errorf("encode %s: %w", command, err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	stop := context.AfterFunc(ctx, func() { _ = m.qmp.Disconnect() })
	reply, err := m.qmp.Run(request)
	if !stop() && err != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return fmt.Errorf("monitor command %s: %w", command, err)
	}
	if result == nil {
		return nil
	}
	answer := struct {
		Return any `json:"return"`
	}{result}
	if err := json.Unmarshal(reply, &answer); err != nil {
		return fmt.Errorf("answer of monitor command %s: %w", command, err)
	}
	return nil
}

// close disconnects and waits for the monitor's goroutine.
func (m *monitor) close() {
	_ = m.qmp.Disconnect() // QEMU may have closed first
	m.done.Wait()
}

// card is one network card as QEMU describes it.
type card struct {
	name, kind, mac string
	peer, peerKind  string // what it is attached to
	peerInfo        string
}

// cards asks QEMU for its network cards. The machine protocol has no command for
// it in the versions we support, so the human one is read.
func (m *monitor) cards(ctx context.Context) ([]card, error) {
	var text string
	args := map[string]string{"command-line": "info network"}
	if err := m.run(ctx, "human-monitor-command", args, &text); err != nil {
		return nil, err
	}
	return parseCards(text), nil
}

// parseCards reads lines like
//
//	nic0: index=0,type=nic,model=virtio-net-device,macaddr=52:48:00:11:22:33
//	 \ net0: index=0,type=stream,connected to unix:/run/net.sock
//
// A backend that no card uses stands alone, without the backslash.
func parseCards(text string) []card {
	var list []card
	for line := range strings.Lines(text) {
		name, info, ok := strings.Cut(strings.TrimSpace(line), ": ")
		if !ok {
			continue
		}
		fields := map[string]string{}
		rest := ""
		for part := range strings.SplitSeq(info, ",") {
			if key, value, ok := strings.Cut(part, "="); ok && rest == "" {
				fields[key] = value
			} else if rest != "" {
				rest += "," + part // a path may hold commas
			} else {
				rest = part
			}
		}
		if peer, ok := strings.CutPrefix(name, `\ `); ok && len(list) > 0 {
			last := &list[len(list)-1]
			last.peer, last.peerKind, last.peerInfo = peer, fields["type"], rest
			continue
		}
		list = append(list, card{name: name, kind: fields["type"], mac: fields["macaddr"]})
	}
	return list
}

// compareNetwork reports every way in which QEMU's network is not the planned one.
func compareNetwork(want Network, socket string, have []card) error {
	if len(have) != 1 {
		return fmt.Errorf("network read back: %d cards or backends, planned is 1", len(have))
	}
	c := have[0]
	var errs []error
	for _, f := range []struct{ what, have, want string }{
		{"card", c.name, want.NIC},
		{"type", c.kind, "nic"},
		{"hardware address", c.mac, want.MAC},
		{"backend", c.peer, want.NetDev},
		{"backend type", c.peerKind, "stream"},
	} {
		if f.have != f.want {
			errs = append(errs, fmt.Errorf("network read back: %s is %q, planned is %q", f.what, f.have, f.want))
		}
	}
	if !strings.HasSuffix(c.peerInfo, socket) {
		errs = append(errs, fmt.Errorf("network read back: backend is %q, planned is a connection to %s", c.peerInfo, socket))
	}
	return errors.Join(errs...)
}

// drain waits until all events that QEMU sent before its end have been seen.
func (m *monitor) drain() {
	seen := make(chan struct{})
	go func() { // ends with the events, at the latest by close
		m.done.Wait()
		close(seen)
	}()
	timer := time.NewTimer(time.Second)
	defer timer.Stop()
	select {
	case <-seen:
	case <-timer.C:
	}
	m.close()
	<-seen
}

// reason is why QEMU said it would end, "" when it did not.
func (m *monitor) reason() string {
	m.reasonMu.Lock()
	defer m.reasonMu.Unlock()
	return m.why
}
