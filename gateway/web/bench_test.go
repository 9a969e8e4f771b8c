package web

import (
	"crypto/tls"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
)

// BenchmarkSmallRequest compares one small answer over kept connections:
// straight to the service, and through the gateway's HTTP side.
func BenchmarkSmallRequest(b *testing.B) {
	f := newFixture(b)
	service := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello") }))
	defer service.Close()
	f.add("demo", 80, ProtocolHTTP, service.Listener.Addr().String())
	many := func(tr *http.Transport) { tr.MaxIdleConnsPerHost = 64 }
	h1 := func(tr *http.Transport) {
		tr.ForceAttemptHTTP2 = false
		tr.TLSClientConfig.NextProtos = []string{"http/1.1"}
		tr.TLSNextProto = map[string]func(string, *tls.Conn) http.RoundTripper{}
	}
	direct := &http.Transport{MaxIdleConnsPerHost: 64}
	defer direct.CloseIdleConnections()
	for _, c := range []struct {
		name, url string
		client    *http.Client
	}{
		{"direct", service.URL, &http.Client{Transport: direct}},
		{"http", "http://demo.helix.local/", f.client(many)},
		{"https1", "https://demo.helix.local/", f.client(many, h1)},
		{"https2", "https://demo.helix.local/", f.client(many)},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			b.SetParallelism(16) // 32 connections on two cores
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					resp, err := c.client.Get(c.url)
					if err != nil {
						b.Error(err)
						return
					}
					_, _ = io.Copy(io.Discard, resp.Body)
					_ = resp.Body.Close()
				}
			})
		})
	}
}

// BenchmarkCertificate is what the first handshake of a name costs more.
func BenchmarkCertificate(b *testing.B) {
	f := newFixture(b)
	for b.Loop() {
		clear(f.ca.leaves)
		if _, err := f.ca.Certificate("demo.helix.local"); err != nil {
			b.Fatal(err)
		}
	}
}
