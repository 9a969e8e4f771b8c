package workspaces

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"
)

func sampleWorkspace() *Workspace {
	at := time.Date(2030, 1, 2, 3, 4, 5, 6, time.UTC)
	return &Workspace{
		ID: "id1", Name: "demo", Created: at, Active: "main", Revision: 7,
		Address: netip.MustParseAddr("127.88.0.2"), Backend: netip.MustParseAddr("127.89.0.2"),
		Targets: []Target{{
			Name: "main", ID: "t1", Kind: KindVM, State: Unknown, LastKnown: Running, Since: at, Generation: 2, Desired: DesiredRunning,
			VM:    &VMSpec{Image: "tiny", CPUs: 2, Policy: PolicyInternet, UUID: "u"},
			Token: &Token{Hash: HashToken("x"), Expires: at, Used: at, UsedBy: []byte{1}}, Credential: []byte{2}, LastSeen: at,
		}},
		Services: []Service{{Name: "web", Port: 80, Protocol: ProtocolHTTP, Exposure: ExposureLocal}},
	}
}

func record(body string) string { return fmt.Sprintf("1 %08x\n%s", sum([]byte(body)), body) }

func TestDecodeWorkspace(t *testing.T) {
	good, err := encodeRecord(sampleWorkspace())
	must(t, err)
	flipped := bytes.Replace(good, []byte("tiny"), []byte("tinz"), 1)
	without := func(change func(w *Workspace)) string {
		w := sampleWorkspace()
		change(w)
		data, err := encodeRecord(w)
		must(t, err)
		return string(data)
	}
	tests := map[string]struct{ data, want string }{
		"good":            {string(good), ""},
		"empty":           {"", "version"},
		"cut short":       {string(good[:len(good)-3]), "checksum"},
		"a byte flipped":  {string(flipped), "checksum"},
		"not JSON":        {record("{"), "body"},
		"no version":      {"x 00000000\n{}", "version"},
		"version 0":       {"0 00000000\n{}", "version"},
		"no sum":          {"1 zz\n{}", "head"},
		"newer":           {"2 whatever comes then\n\x00", "newer"},
		"other name":      {without(func(w *Workspace) { w.Name = "other" }), `"other"`},
		"no ID":           {without(func(w *Workspace) { w.ID = "" }), "identity"},
		"no address":      {without(func(w *Workspace) { w.Address = netip.Addr{} }), "addresses"},
		"no targets":      {without(func(w *Workspace) { w.Targets = nil }), "targets"},
		"strange state":   {without(func(w *Workspace) { w.Targets[0].State = "dancing" }), "dancing"},
		"no such active":  {without(func(w *Workspace) { w.Active = "gpu" }), "gpu"},
		"address is text": {record(`{"address":"nowhere"}`), "body"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			w, err := decodeWorkspace("demo", []byte(tt.data))
			if tt.want == "" {
				if err != nil || w.Targets[0].VM.Image != "tiny" {
					t.Fatalf("got %v, %v", w, err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("got %v, want an error with %q", err, tt.want)
			}
		})
	}
}

func TestNewerRecordHint(t *testing.T) {
	var v *VersionError
	if err := decodeRecord([]byte("9 x\n"), &Event{}); !errors.As(err, &v) || v.Version != 9 || v.Hint() == "" {
		t.Errorf("got %v", err)
	}
}

// FuzzRecord: the decoder never panics, and what it accepts survives being
// written and read again.
func FuzzRecord(f *testing.F) {
	good, err := encodeRecord(sampleWorkspace())
	if err != nil {
		f.Fatal(err)
	}
	_, body, _ := bytes.Cut(good, []byte("\n"))
	f.Add(good, false)
	f.Add(body, true)
	f.Add([]byte("2 0\n{}"), false)
	f.Add([]byte(`{"name":"demo","targets":null}`), true)
	f.Fuzz(func(t *testing.T, data []byte, isBody bool) {
		if isBody { // lets the fuzzer past the checksum
			data = []byte(record(string(data)))
		}
		w, err := decodeWorkspace("demo", data)
		if err != nil {
			return
		}
		again, err := encodeRecord(w)
		if err != nil {
			t.Fatalf("accepted but cannot be written: %v", err)
		}
		w2, err := decodeWorkspace("demo", again)
		if err != nil {
			t.Fatalf("accepted but not read again: %v\n%s", err, again)
		}
		a, errA := json.Marshal(w)
		b, errB := json.Marshal(w2)
		if errA != nil || errB != nil || !bytes.Equal(a, b) {
			t.Fatalf("changed on the way:\n%s\n%s", a, b)
		}
	})
}
