package web

import (
	"context"
	"log/slog"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap/zapcore"
)

// logModule hands Caddy's log lines to the instance's slog logger. Nothing of
// Caddy is above debug unless it is a warning or worse.
type logModule struct {
	module
	with []zapcore.Field
}

// CaddyModule describes the module.
func (logModule) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "caddy.logging.cores.helix", New: func() caddy.Module { return new(logModule) }}
}

func slogLevel(l zapcore.Level) slog.Level {
	// An error in Caddy's eyes is one request's or one handshake's: somebody
	// has to act on none of them.
	if l >= zapcore.WarnLevel {
		return slog.LevelWarn
	}
	return slog.LevelDebug
}

// Enabled implements zapcore.Core.
func (m *logModule) Enabled(l zapcore.Level) bool {
	return m.server != nil && m.server.log.Enabled(context.Background(), slogLevel(l))
}

// With implements zapcore.Core. Caddy calls it for each request, mostly for
// lines that are never written, so nothing is encoded here.
func (m *logModule) With(fields []zapcore.Field) zapcore.Core {
	return &logModule{module: m.module, with: append(m.with[:len(m.with):len(m.with)], fields...)}
}

// Check implements zapcore.Core.
func (m *logModule) Check(e zapcore.Entry, c *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if m.Enabled(e.Level) {
		return c.AddCore(e, m)
	}
	return c
}

// Write implements zapcore.Core. Caddy's text is an attribute, because
// messages of ours are constant.
func (m *logModule) Write(e zapcore.Entry, fields []zapcore.Field) error {
	all := []slog.Attr{slog.String("part", e.LoggerName), slog.String("text", e.Message)}
	all = append(append(all, attrs(m.with)...), attrs(fields)...)
	m.server.log.LogAttrs(context.Background(), slogLevel(e.Level), "caddy", all...)
	return nil
}

// Sync implements zapcore.Core.
func (m *logModule) Sync() error { return nil }

func attrs(fields []zapcore.Field) []slog.Attr {
	enc := zapcore.NewMapObjectEncoder()
	for _, f := range fields {
		f.AddTo(enc)
	}
	out := make([]slog.Attr, 0, len(enc.Fields))
	for k, v := range enc.Fields {
		if d, ok := v.(time.Duration); ok {
			v = d.String()
		}
		out = append(out, slog.Any(strings.ReplaceAll(k, "-", "_"), v))
	}
	return out
}

// stdLog gets the lines of the log package, where Caddy and its libraries
// report what has no better place, and hands them to Caddy's current logger.
type stdLog struct{}

// Write implements io.Writer.
func (stdLog) Write(p []byte) (int, error) {
	line := strings.TrimSpace(string(p))
	if strings.HasPrefix(line, "[ERROR]") {
		caddy.Log().Warn(line)
	} else {
		caddy.Log().Debug(line)
	}
	return len(p), nil
}

var _ zapcore.Core = (*logModule)(nil)
