package workspaces

import (
	"errors"
	"testing"
	"time"
)

var allStates = []State{Stopped, Starting, Running, Stopping, Failed, Unknown, Deleting}

// TestMoves holds the drawing at State as a table: every pair that is not named
// here is refused and leaves the target alone.
func TestMoves(t *testing.T) {
	drawn := map[State][]State{
		Stopped:  {Starting},
		Starting: {Running, Stopping, Failed},
		Running:  {Stopping, Failed},
		Stopping: {Stopped, Failed},
		Failed:   {Starting, Stopping},
		Unknown:  {Stopped, Starting, Running, Stopping, Failed},
		Deleting: {},
	}
	for _, from := range allStates {
		want := map[State]bool{from: true, Deleting: true, Unknown: from != Deleting}
		for _, to := range drawn[from] {
			want[to] = true
		}
		for _, to := range append(allStates, "", "dancing") {
			tg := Target{State: from, Reason: "before"}
			err := tg.move(Move{To: to, Reason: "after"}, time.Unix(1, 0))
			if (err == nil) != want[to] {
				t.Errorf("%s -> %s: got %v, want legal %v", from, to, err, want[to])
			}
			if err != nil && (!errors.Is(err, ErrIllegalMove) || tg.State != from || tg.Reason != "before") {
				t.Errorf("%s -> %s: refused with %v, target is now %+v", from, to, err, tg)
			}
		}
	}
}

func TestMoveFields(t *testing.T) {
	t0, t1 := time.Unix(100, 0), time.Unix(200, 0)
	steps := []struct {
		move Move
		want Target
	}{
		{Move{To: Starting, Stage: StagePrepare}, Target{State: Starting, Stage: StagePrepare, Since: t1}},
		{Move{To: Starting, Stage: StageBoot}, Target{State: Starting, Stage: StageBoot, Since: t1}},
		{Move{To: Failed, Reason: "no answer", Hint: "see the console"}, Target{State: Failed, Stage: StageBoot, Reason: "no answer", Hint: "see the console", Since: t1}},
		{Move{To: Unknown, Reason: "gateway was away"}, Target{State: Unknown, LastKnown: Failed, Stage: StageBoot, Reason: "gateway was away", Since: t1}},
		{Move{To: Unknown, Reason: "still"}, Target{State: Unknown, LastKnown: Failed, Stage: StageBoot, Reason: "still", Since: t1}},
		{Move{To: Failed, Stage: StageShim}, Target{State: Failed, Stage: StageShim, Since: t1}},
		{Move{To: Starting}, Target{State: Starting, Since: t1}},
		{Move{To: Running}, Target{State: Running, Since: t1}},
	}
	got := Target{State: Stopped, Since: t0}
	for _, s := range steps {
		if err := got.move(s.move, t1); err != nil {
			t.Fatal(err)
		}
		if got.State != s.want.State || got.LastKnown != s.want.LastKnown || got.Stage != s.want.Stage ||
			got.Reason != s.want.Reason || got.Hint != s.want.Hint || !got.Since.Equal(s.want.Since) {
			t.Fatalf("after %+v:\ngot  %+v\nwant %+v", s.move, got, s.want)
		}
	}
	if err := got.move(Move{To: Running, Reason: "agent absent"}, time.Unix(300, 0)); err != nil || !got.Since.Equal(t1) {
		t.Errorf("same state again: since %v, err %v; want %v", got.Since, err, t1)
	}
}

func TestMoveGeneration(t *testing.T) {
	tg := Target{State: Starting, Generation: 3}
	if err := tg.move(Move{To: Failed, Generation: 2}, time.Now()); !errors.Is(err, ErrStaleGeneration) || tg.State != Starting {
		t.Errorf("a late comer: got %v, state %s", err, tg.State)
	}
	if err := tg.move(Move{To: Running, Generation: 3}, time.Now()); err != nil {
		t.Error(err)
	}
}
