package workspaces_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"helix.local/helix/workspaces"
)

// A start from its beginning to a running target, and what watchers see of it.
func Example() {
	folder, err := os.MkdirTemp("", "example")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(folder)
	r, err := workspaces.Open(filepath.Join(folder, "registry.db"), workspaces.Options{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer r.Close()

	w, err := r.Create(workspaces.Spec{Name: "demo", Targets: []workspaces.TargetSpec{
		{Kind: workspaces.KindDir, Dir: &workspaces.DirSpec{Path: "/srv/demo"}},
	}})
	fmt.Println(w.Address, w.ActiveTarget().State, err)

	w, err = r.BeginStart("demo", "main", workspaces.Start{
		TokenHash: workspaces.HashToken("one-time secret"), Expires: time.Now().Add(time.Minute),
	})
	t := w.ActiveTarget()
	_, err2 := r.Pair(workspaces.Pairing{TargetID: t.ID, Generation: t.Generation, Token: "one-time secret", PublicKey: make([]byte, 32)})
	_, err3 := r.SetState("demo", "main", workspaces.Move{To: workspaces.Running, Generation: t.Generation})
	fmt.Println(errors.Join(err, err2, err3))

	events, err := r.Events(0)
	for _, e := range events {
		fmt.Println(e.Seq, e.Kind, e.Workspace, e.State)
	}
	_, err = r.Get("dmeo")
	fmt.Println(err)
	// Output:
	// 127.88.0.2 stopped <nil>
	// <nil>
	// 1 created demo stopped
	// 2 state demo starting
	// 3 paired demo starting
	// 4 state demo running
	// workspace "dmeo": not found
}
