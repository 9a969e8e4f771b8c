//go:build linux

package e2e

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/json"
	"errors"
	"net"
	"path/filepath"
	"testing"
	"time"

	"helix.local/helix/agent/wire"
	"helix.local/helix/tunnel"
)

// secondUse shows the secret of a target that is paired already, with a key of
// its own, where guests' links come in. It returns the gateway's refusal.
func secondUse(t *testing.T, g *gateway, name, token string) wire.Refusal {
	t.Helper()
	text := g.must("exec", "-u", "root", name, "--", "cat", "/sys/firmware/qemu_fw_cfg/by_name/opt/helix/boot/raw")
	var boot wire.Boot
	if err := json.Unmarshal([]byte(text), &boot); err != nil {
		t.Fatal(err)
	}
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", filepath.Join(g.state, "links.sock"))
	if err != nil {
		t.Fatal(err)
	}
	session, err := tunnel.Connect(ctx, conn, tunnel.AgentConfig{
		Target: boot.Target, Generation: boot.Generation, Version: "test", Link: wire.LinkTCP,
		Key: key, Token: wire.Secret(token), GatewayKey: boot.GatewayKey,
	})
	if err == nil {
		_ = session.Close() // it must not be there at all
		t.Fatal("a second agent was let in with the spent secret")
	}
	refused, ok := errors.AsType[*tunnel.RefusedError](err)
	if !ok {
		t.Fatalf("not refused, but %v", err)
	}
	return refused.Reason
}
