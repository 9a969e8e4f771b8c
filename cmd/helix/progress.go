package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"sync/atomic"
	"time"

	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"
	"golang.org/x/term"
)

// progress shows stages, one after the other, on standard error.
type progress interface {
	begin(stage string)
	end(stage string, took time.Duration, ok bool)
	amount(done, total int64) // of the stage at hand
	note(text string)         // a line beside the stages
	close()                   // may be called again
}

// newProgress draws on a terminal and writes plain lines elsewhere.
func (a *app) newProgress(ctx context.Context) progress {
	if isTerminal(a.stderr) {
		return &bars{all: mpb.NewWithContext(ctx, mpb.WithOutput(a.stderr), mpb.WithWidth(40))}
	}
	return plain{a.stderr}
}

func isTerminal(f any) bool {
	file, ok := f.(*os.File)
	return ok && term.IsTerminal(int(file.Fd()))
}

// plain has a line for each stage that has ended.
type plain struct{ w io.Writer }

func (plain) begin(string)        {}
func (plain) amount(int64, int64) {}
func (plain) close()              {}

func (p plain) end(stage string, took time.Duration, ok bool) {
	p.note("  " + stageLine(stage, took, ok))
}

func (p plain) note(text string) {
	_, _ = fmt.Fprintln(p.w, text) // progress is a courtesy: the result does not depend on it
}

func stageLine(stage string, took time.Duration, ok bool) string {
	line := fmt.Sprintf("%-12s %7.2f s", stage, took.Seconds())
	if !ok {
		line += "  failed"
	}
	return line
}

// bars has a line for each stage; that of the stage at hand moves.
type bars struct {
	all    *mpb.Progress
	line   *mpb.Bar
	finish func(text string) // what line shows from then on
	closed bool
}

func (b *bars) begin(stage string) {
	began := time.Now()
	text := &atomic.Pointer[string]{}
	show := func(s decor.Statistics) string {
		if final := text.Load(); final != nil {
			return "  " + *final
		}
		line := "  " + stageLine(stage, time.Since(began), true)
		if s.Total > 1 {
			line += fmt.Sprintf("  %s of %s", byteSize(s.Current), byteSize(s.Total))
		}
		return line
	}
	b.line = b.all.New(0, mpb.SpinnerStyle(), mpb.BarWidth(3), mpb.BarFillerClearOnComplete(), mpb.BarFillerClearOnAbort(),
		mpb.PrependDecorators(decor.Any(show)))
	b.finish = func(final string) { text.Store(&final) }
}

func (b *bars) end(stage string, took time.Duration, ok bool) {
	if b.line == nil {
		return
	}
	b.finish(stageLine(stage, took, ok))
	b.line.Abort(false)
	b.line = nil
}

func (b *bars) amount(done, total int64) {
	if b.line != nil && total > 0 {
		b.line.SetTotal(total, false)
		b.line.SetCurrent(min(done, total-1)) // the end of the stage ends it, not the amount
	}
}

func (b *bars) note(text string) {
	_, _ = fmt.Fprintln(b.all, text) // progress is a courtesy: the result does not depend on it
}

func (b *bars) close() {
	if b.closed {
		return
	}
	b.closed = true
	if b.line != nil {
		b.line.Abort(false)
	}
	b.all.Wait()
}
