package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"helix.local/helix/gateway/api"
)

// Event kinds and states, as the gateway names them.
const (
	kindState   = "state"
	kindDeleted = "deleted"
	kindWarning = "warning"
	kindRefused = "refused"
	kindLost    = "lost" // the watcher was too slow: events are missing before the next

	stateStarting = "starting"
	stateRunning  = "running"
	stateStopping = "stopping"
	stateStopped  = "stopped"
	stateFailed   = "failed"
)

// consoleLines is how much of the console a failure shows.
const consoleLines = 10

// errSettled ends a watch that has seen what it waited for.
var errSettled = errors.New("settled")

// outlook follows the events of one workspace until what was asked has come to
// an end.
type outlook struct {
	doing   string // `create "x"`, for errors
	until   string // stateRunning or stateStopped
	again   bool   // a restart: how it was before says nothing
	left    bool   // the state from before has been left
	started bool   // a start has been seen
	stage   string // the last one seen
}

// see judges one event. It returns errSettled at the good end, a *failedError
// at a bad one, nil when the wait goes on.
func (o *outlook) see(e api.Event) error {
	if e.Kind == kindDeleted {
		return &failedError{Doing: o.doing, Stage: o.stage, Message: "the workspace was removed meanwhile"}
	}
	if e.Kind != kindState {
		return nil
	}
	switch e.State {
	case stateStarting:
		o.started, o.left = true, true
		if e.Stage != "" {
			o.stage = e.Stage
		}
	case stateFailed:
		if e.Stage != "" {
			o.stage = e.Stage
		}
		return &failedError{Doing: o.doing, Stage: o.stage, Message: e.Message, Cure: e.Hint}
	case stateRunning:
		if o.until == stateRunning && (o.left || !o.again) {
			return errSettled
		}
	case stateStopping, stateStopped:
		o.left = true
		if o.until == stateStopped && e.State == stateStopped {
			return errSettled
		}
		if o.until == stateRunning && (o.started || !o.again) {
			return &failedError{Doing: o.doing, Stage: o.stage, Message: "the workspace was stopped meanwhile"}
		}
	}
	return nil
}

// settled judges the answer to the request itself: a start of what runs
// already makes no event.
func (o *outlook) settled(ws api.Workspace) bool {
	return !o.again && active(ws).State == o.until
}

// active is the target that the hostname leads to.
func active(ws api.Workspace) api.Target {
	for _, t := range ws.Targets {
		if t.Name == ws.Active {
			return t
		}
	}
	return api.Target{}
}

// follow watches the events of workspace name, asks for the change by act once
// the watch stands, so that nothing is missed, and shows the stages until o has
// come to its end. It returns the workspace as it is then.
func (a *app) follow(ctx context.Context, c *api.Client, name string, o *outlook, act func(context.Context) (api.Workspace, error)) (api.Workspace, error) {
	view := a.newProgress(ctx)
	defer view.close()
	stages := stageClock{view: view}
	watch, cancel := context.WithCancel(ctx)
	defer cancel()
	var result error
	err := c.Events(watch, api.New, name, func() {
		ws, err := act(watch)
		if err == nil && o.settled(ws) {
			err = errSettled
		}
		if result = err; err != nil {
			cancel()
		}
	}, func(e api.Event) error {
		if result != nil { // the answer has decided; what comes is about others
			return result
		}
		if e.Kind == kindLost {
			ws, err := c.Workspace(watch, name)
			if err != nil {
				result = err
				return err
			}
			t := active(ws)
			e.Kind, e.State, e.Stage, e.Message, e.Hint = kindState, t.State, t.Stage, t.Reason, t.Hint
		}
		result = o.see(e)
		stages.see(e, result)
		return result
	})
	if result == nil {
		result = err
	}
	view.close()
	switch {
	case errors.Is(result, errSettled):
		ws, err := c.Workspace(ctx, name)
		return ws, doing(o.doing, err)
	case ctx.Err() != nil:
		return api.Workspace{}, interrupted(ctx, doing(o.doing, ctx.Err()), o.doing, "it goes on without this command; see: helix status "+name)
	case errors.Is(result, io.ErrUnexpectedEOF):
		return api.Workspace{}, lostGateway(o, name)
	}
	if failed, ok := errors.AsType[*failedError](result); ok {
		failed.Console = lastLines(ctx, c, name)
		return api.Workspace{}, failed
	}
	return api.Workspace{}, doing(o.doing, result)
}

// doing says what an error stood in the way of.
func doing(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", what, err)
}

func lostGateway(o *outlook, name string) error {
	at := ""
	if o.stage != "" {
		at = " at stage " + o.stage
	}
	return &hintError{
		fmt.Errorf("%s: the gateway went away%s: %w", o.doing, at, api.ErrNoGateway),
		"start it again with: helix up; then see: helix status " + name,
	}
}

// lastLines is the end of the console. That there is none, or no way to it, is
// no news beside the failure that it belongs to.
func lastLines(ctx context.Context, c *api.Client, name string) []string {
	var text bytes.Buffer
	if err := c.Logs(ctx, name, consoleLines, false, &text); err != nil {
		return nil
	}
	all := strings.Split(strings.TrimRight(strings.ReplaceAll(text.String(), "\r\n", "\n"), "\n"), "\n")
	if len(all) == 1 && all[0] == "" {
		return nil
	}
	return all[max(0, len(all)-consoleLines):]
}

// stageClock turns events into stages with a beginning and an end, by the
// gateway's clock.
type stageClock struct {
	view  progress
	stage string
	since time.Time
}

func (s *stageClock) see(e api.Event, result error) {
	switch e.Kind {
	case kindWarning, kindRefused:
		text := "warning: " + e.Message
		if e.Hint != "" {
			text += "\nhint: " + e.Hint
		}
		s.view.note(clean(text))
		return
	case kindState:
	default:
		return
	}
	stage := ""
	switch e.State {
	case stateStarting:
		stage = e.Stage
	case stateStopping:
		stage = "stop"
	}
	if result == nil && stage == s.stage {
		return
	}
	if s.stage != "" {
		s.view.end(s.stage, e.Time.Sub(s.since), result == nil || errors.Is(result, errSettled))
	}
	s.stage, s.since = stage, e.Time
	if result != nil {
		s.stage = ""
	}
	if s.stage != "" {
		s.view.begin(clean(stage))
	}
}
