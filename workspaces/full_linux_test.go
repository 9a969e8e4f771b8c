package workspaces

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// TestDiskFull: on a full disk a change fails with that reason, what was there
// stays, and changes go on when there is room again. Only root may mount the small
// disk it needs.
func TestDiskFull(t *testing.T) {
	if os.Geteuid() == 0 {
		disk := t.TempDir()
		must(t, syscall.Mount("tmpfs", disk, "tmpfs", 0, "size=512k"))
		t.Cleanup(func() { must(t, syscall.Unmount(disk, 0)) })
		testDiskFull(t, disk)
	}
}

func testDiskFull(t *testing.T, disk string) {
	path, ballast := filepath.Join(disk, "registry.db"), filepath.Join(disk, "ballast")
	must(t, os.WriteFile(ballast, make([]byte, 300<<10), 0o600))
	r := open(t, path, Options{})
	made := 0
	var err error
	for ; err == nil && made < 10_000; made++ {
		_, err = r.Create(dirSpec(fmt.Sprintf("w%d", made)))
	}
	made--
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("after %d: got %v, want no space left", made, err)
	}
	seq := r.Seq()
	if got := len(r.List()); got != made || seq != uint64(made) {
		t.Errorf("%d workspaces, %d events; want %d of each", got, seq, made)
	}
	must(t, os.Remove(ballast))
	create(t, r, "after")
	must(t, r.Delete("w0"))
	must(t, r.Close())
	r = open(t, path, Options{})
	if got := len(r.List()); got != made || r.Seq() != seq+2 || len(r.Broken()) != 0 {
		t.Errorf("after reopening: %d workspaces, seq %d, broken %v; want %d, %d", got, r.Seq(), r.Broken(), made, seq+2)
	}
}
