package wire

import (
	"bytes"
	"crypto/ed25519"
	"fmt"
	"log/slog"
	"strings"
	"testing"
)

func TestSecretIsNeverShown(t *testing.T) {
	const word = "hunter2hunter2"
	boot := Boot{Workspace: "demo", Token: word}
	in := &Introduction{Target: "demo", Token: word}
	id := Identity{HostKey: word}
	s := Secret(word)
	var shown strings.Builder
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q"} {
		for _, v := range []any{s, &s, boot, &boot, in, *in, id, []Secret{s}, map[string]Secret{"k": s}} {
			fmt.Fprintf(&shown, verb+"\n", v)
		}
	}
	for _, h := range []slog.Handler{
		slog.NewTextHandler(&shown, nil),
		slog.NewJSONHandler(&shown, nil),
	} {
		slog.New(h).Info("x", "token", s, "group", slog.GroupValue(slog.Any("t", s)))
	}
	fmt.Fprint(&shown, s, fmt.Errorf("pair with %v", s))
	if text := shown.String(); strings.Contains(text, word) || !strings.Contains(text, "redacted") {
		t.Errorf("shown: %s", text)
	}
	// It must still travel.
	var buf bytes.Buffer
	if err := WriteFrame(&buf, boot); err != nil {
		t.Fatal(err)
	}
	var got Boot
	if err := ReadFrame(&buf, &got); err != nil || string(got.Token) != word {
		t.Errorf("token did not travel: %v", err)
	}
}

// split cuts parts from data by the lengths given, so that a fuzzer reaches
// handshakes that differ only in where a field ends.
func split(data []byte, lengths ...uint8) [][]byte {
	var parts [][]byte
	for _, n := range lengths {
		at := min(int(n), len(data))
		parts = append(parts, data[:at])
		data = data[at:]
	}
	return append(parts, data)
}

func FuzzSessionTextIsInjective(f *testing.F) {
	f.Add([]byte("nonceNONCEtargetlinkkey"), uint64(1), uint8(5), uint8(5), uint8(6), uint8(4), uint64(1), uint8(5), uint8(5), uint8(5), uint8(5))
	f.Add([]byte("11111"), uint64(1), uint8(1), uint8(1), uint8(1), uint8(1), uint64(11), uint8(1), uint8(1), uint8(0), uint8(2))
	f.Fuzz(func(t *testing.T, data []byte, g1 uint64, a1, b1, c1, d1 uint8, g2 uint64, a2, b2, c2, d2 uint8) {
		text := func(g uint64, parts [][]byte) []byte {
			return SessionText("agent", Hello{Nonce: parts[0]}, Introduction{
				Nonce: parts[1], Target: string(parts[2]), Link: string(parts[3]), Generation: g, PublicKey: parts[4],
			}, nil)
		}
		p1, p2 := split(data, a1, b1, c1, d1), split(data, a2, b2, c2, d2)
		same := g1 == g2
		for i := range p1 {
			same = same && bytes.Equal(p1[i], p2[i])
		}
		if got := bytes.Equal(text(g1, p1), text(g2, p2)); got != same {
			t.Fatalf("texts equal: %v, handshakes equal: %v\n%q %d\n%q %d", got, same, p1, g1, p2, g2)
		}
	})
}

func TestSessionTextCoversEveryPart(t *testing.T) {
	h := Hello{Nonce: []byte("a")}
	in := Introduction{Nonce: []byte("b"), Target: "t", Generation: 1, Link: LinkUnix, PublicKey: []byte("k")}
	texts := map[string]string{}
	add := func(name, role string, h Hello, in Introduction, binding string) {
		text := string(SessionText(role, h, in, []byte(binding)))
		if other, ok := texts[text]; ok {
			t.Errorf("%s and %s sign one text", name, other)
		}
		texts[text] = name
	}
	add("base", "agent", h, in, "")
	add("role", "gateway", h, in, "")
	add("binding", "agent", h, in, "x")
	add("gateway's nonce", "agent", Hello{Nonce: []byte("A")}, in, "")
	for name, change := range map[string]func(*Introduction){
		"agent's nonce": func(i *Introduction) { i.Nonce = []byte("B") },
		"target":        func(i *Introduction) { i.Target = "u" },
		"generation":    func(i *Introduction) { i.Generation = 2 },
		"link":          func(i *Introduction) { i.Link = LinkTCP },
		"key":           func(i *Introduction) { i.PublicKey = []byte("K") },
	} {
		other := in
		change(&other)
		add(name, "agent", h, other, "")
	}
}

func TestVerified(t *testing.T) {
	public, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	text := []byte("text")
	signature := ed25519.Sign(private, text)
	for name, c := range map[string]struct {
		key, text, signature []byte
		want                 bool
	}{
		"right":         {public, text, signature, true},
		"other text":    {public, []byte("Text"), signature, false},
		"short key":     {public[:31], text, signature, false},
		"no key":        {nil, text, signature, false},
		"no signature":  {public, text, nil, false},
		"long key":      {append(bytes.Clone(public), 0), text, signature, false},
		"cut signature": {public, text, signature[:63], false},
	} {
		if got := Verified(c.key, c.text, c.signature); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}
