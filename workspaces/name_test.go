package workspaces

import (
	"errors"
	"slices"
	"strings"
	"testing"
)

func TestCheckName(t *testing.T) {
	long := strings.Repeat("a", 63)
	tests := map[string]struct {
		reason string // a part of it; "" = accepted
		better string
	}{
		"demo":                 {},
		"a":                    {},
		"1a":                   {},
		"a-b--c":               {},
		long:                   {},
		"":                     {reason: "empty"},
		long + "a":             {reason: "64 characters", better: long},
		"Demo":                 {reason: "upper-case", better: "demo"},
		"my_app":               {reason: "character other", better: "my-app"},
		"a.b":                  {reason: "character other", better: "a-b"},
		"-a":                   {reason: "hyphen", better: "a"},
		"a-":                   {reason: "hyphen", better: "a"},
		"8080":                 {reason: "port", better: "ws-8080"},
		"xn--bcher-kva":        {reason: "xn--", better: "bcher-kva"},
		"bücher":               {reason: "character other", better: "b-cher"},
		"a\x00b":               {reason: "character other", better: "a-b"},
		"___":                  {reason: "character other"},
		"gw":                   {reason: "gateway's own", better: "my-gw"},
		"www":                  {reason: "browsers", better: "my-www"},
		"localhost":            {reason: "resolvers", better: "my-localhost"},
		"wpad":                 {reason: "obey", better: "my-wpad"},
		"ns1":                  {reason: "network service", better: "my-ns1"},
		"api":                  {reason: "own pages", better: "my-api"},
		"GW":                   {reason: "upper-case"},
		"\xff\xfe":             {reason: "character other"},
		"xn--" + long:          {reason: "67 characters"},
		"a" + long + "-------": {reason: "71 characters"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			err := CheckName(name)
			if tt.reason == "" {
				if err != nil {
					t.Fatalf("got %v, want it accepted", err)
				}
				return
			}
			var fault *NameError
			if !errors.As(err, &fault) || !strings.Contains(fault.Reason, tt.reason) {
				t.Fatalf("got %v, want a reason with %q", err, tt.reason)
			}
			if tt.better != "" && fault.Better != tt.better {
				t.Errorf("better name: got %q, want %q", fault.Better, tt.better)
			}
			if fault.Hint() == "" {
				t.Error("no hint")
			}
			if got, want := errors.Is(err, ErrReserved), strings.HasPrefix(fault.Reason, "reserved"); got != want {
				t.Errorf("is ErrReserved: got %v, want %v", got, want)
			}
		})
	}
}

// FuzzName: what is accepted is a DNS label, and what is proposed is accepted.
func FuzzName(f *testing.F) {
	for _, s := range []string{"demo", "Demo", "-", "1", "xn--a", "gw", "a_b", "ü", strings.Repeat("9", 70), "xn--xn--a", "a\n"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, name string) {
		err := CheckName(name)
		if err == nil {
			if len(name) == 0 || len(name) > 63 || strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" {
				t.Fatalf("accepted %q", name)
			}
			return
		}
		var fault *NameError
		if !errors.As(err, &fault) {
			t.Fatalf("%q: not a NameError: %v", name, err)
		}
		if fault.Better != "" && CheckName(fault.Better) != nil {
			t.Fatalf("%q: proposes %q, which is refused", name, fault.Better)
		}
	})
}

func TestNearest(t *testing.T) {
	have := []string{"demo", "demo2", "api-server", "web", "x"}
	for name, want := range map[string]string{
		"dmeo": "demo", "demo1": "demo", "api-sever": "api-server", "wbe": "web", "zzz": "", "": "x", "demo22": "demo2", "completely-other": "",
	} {
		if got := nearest(name, slices.Values(have)); got != want {
			t.Errorf("nearest %q: got %q, want %q", name, got, want)
		}
	}
}

func TestEditDistance(t *testing.T) {
	for _, tt := range []struct {
		a, b string
		want int
	}{{"", "", 0}, {"", "abc", 3}, {"abc", "abc", 0}, {"abc", "acb", 1}, {"kitten", "sitting", 3}, {"ab", "ba", 1}} {
		if got := editDistance(tt.a, tt.b); got != tt.want {
			t.Errorf("%q %q: got %d, want %d", tt.a, tt.b, got, tt.want)
		}
	}
}
