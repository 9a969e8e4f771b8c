package tunnel

import (
	"io"
	"net"
	"testing"

	"github.com/hashicorp/yamux"

	"helix.local/helix/agent/wire"
)

const benchChunk = 64 << 10

// sink benchmarks w, whose bytes somebody discards from r.
func sink(b *testing.B, w io.Writer, r io.Reader) {
	b.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, benchChunk)
		for {
			if _, err := r.Read(buf); err != nil {
				return
			}
		}
	}()
	chunk := make([]byte, benchChunk)
	b.SetBytes(benchChunk)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := w.Write(chunk); err != nil {
			b.Fatal(err)
		}
	}
	if c, ok := w.(interface{ CloseWrite() error }); ok {
		must(b, c.CloseWrite())
	} else {
		must(b, w.(io.Closer).Close())
	}
	<-done
}

func BenchmarkThroughput(b *testing.B) {
	for _, network := range []string{"tcp", "unix"} {
		b.Run("plain/"+network, func(b *testing.B) {
			x, y := sockets(b, network)
			sink(b, x, y)
		})
		b.Run("yamux/"+network, func(b *testing.B) {
			x, y := rawStreams(b, network)
			sink(b, x, y)
		})
		b.Run("stream/"+network, func(b *testing.B) {
			x, y := sockets(b, network)
			j := joinOver(b, x, y, Limits{}, Limits{})
			sink(b, j.gst, j.ast)
		})
	}
}

// rawStreams is yamux as it comes, with the same window.
func rawStreams(b *testing.B, network string) (x, y net.Conn) {
	b.Helper()
	cfg := yamux.DefaultConfig()
	cfg.LogOutput, cfg.MaxStreamWindowSize = io.Discard, 1<<20
	cx, cy := sockets(b, network)
	sx, err := yamux.Client(cx, cfg)
	must(b, err)
	sy, err := yamux.Server(cy, cfg)
	must(b, err)
	b.Cleanup(func() {
		_ = sx.Close()
		_ = sy.Close()
	})
	x, err = sx.Open()
	must(b, err)
	y, err = sy.Accept()
	must(b, err)
	return x, y
}

func BenchmarkRoundTrip(b *testing.B) {
	run := func(b *testing.B, x, y net.Conn) {
		b.Helper()
		done := make(chan struct{})
		go func() {
			defer close(done)
			buf := make([]byte, 1024)
			for {
				n, err := y.Read(buf)
				if err != nil {
					return
				}
				if _, err := y.Write(buf[:n]); err != nil {
					return
				}
			}
		}()
		buf := make([]byte, 100)
		b.ReportAllocs()
		for b.Loop() {
			if _, err := x.Write(buf); err != nil {
				b.Fatal(err)
			}
			if _, err := io.ReadFull(x, buf); err != nil {
				b.Fatal(err)
			}
		}
		must(b, x.Close())
		<-done
	}
	b.Run("plain", func(b *testing.B) {
		x, y := sockets(b, "tcp")
		run(b, x, y)
	})
	b.Run("yamux", func(b *testing.B) {
		x, y := rawStreams(b, "tcp")
		run(b, x, y)
	})
	b.Run("stream", func(b *testing.B) {
		j := join(b, Limits{}, Limits{})
		run(b, j.gst, j.ast)
	})
}

func BenchmarkOpen(b *testing.B) {
	x, y := sockets(b, "tcp")
	gw, ag := pair(b, x, y, Limits{}, Limits{})
	serve(b, ag, handed(make(chan *Stream, 1<<20), closedChan()))
	b.ReportAllocs()
	for b.Loop() {
		st, err := gw.Open(b.Context(), wire.OpenRequest{Service: "x"})
		if err != nil {
			b.Fatal(err)
		}
		must(b, st.Close())
	}
}

func closedChan() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}
