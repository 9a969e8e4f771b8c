// Package vmctl runs one virtual machine, from launch plan to exit.
//
// NewPlan decides everything as data and touches nothing. Start carries a plan
// out: it spawns a shim, a small process of its own that owns QEMU, its monitor,
// its console and its network (RunShim), and outlives the caller. Adopt finds a
// running shim again. A machine is recognised by its UUID and generation, which
// its shim tells over a socket; a process number from a file is never trusted.
//
// The run folder of a machine is its identity on disk: whoever holds the lock
// file in it, or has inherited that lock, belongs to the machine.
package vmctl

import (
	"errors"
	"fmt"
	"time"

	"helix.local/helix/vmctl/guestnet"
	"helix.local/helix/vmctl/image"
)

var (
	// ErrNotRunning reports a run folder that no shim is alive for.
	ErrNotRunning = errors.New("machine is not running")
	// ErrOtherMachine reports a shim whose UUID or generation is not the asked one.
	ErrOtherMachine = errors.New("another machine runs here")
	// ErrRunning reports a start of a machine whose shim or QEMU is still alive.
	ErrRunning = errors.New("machine is already running")
	// ErrUnsupported reports something this operating system cannot do.
	ErrUnsupported = errors.New("not supported on this operating system")
)

// ControlPort is the name of the virtio-serial port a guest's agent speaks on.
const ControlPort = "org.helix.control"

// BootItem is the fw_cfg item that holds the guest's wire.Boot as JSON.
const BootItem = "opt/helix/boot"

// Accel says how a guest's code is run.
type Accel string

// The choices.
const (
	AccelAuto Accel = ""    // hardware when it can be used, else TCG with a warning
	AccelKVM  Accel = "kvm" // hardware (KVM, HVF or WHPX, by the host) or an error
	AccelTCG  Accel = "tcg" // emulation, slow and everywhere
)

// Machine is what a virtual machine is asked to be.
type Machine struct {
	Name       string          // workspace name, a DNS label
	UUID       string          // stays the same for the life of the workspace
	Generation uint64          // counts starts
	CPUs       int             // 0: 2, or 1 under TCG, where each one costs boot time
	MemoryMB   int             // 0: 1024
	DiskGB     int             // size of the workspace disk, 0: 8; sparse
	Image      image.Image     // kernel and initramfs
	RunDir     string          // folder for the machine's files, absolute
	Policy     guestnet.Policy // "": internet
	LinkSocket string          // unix socket of the gateway behind the guest's fast link, "": none
	Accel      Accel
}

// State is where a machine is in its life, as its shim sees it.
//
//	Starting -> Running -> Stopping -> Exited
//	Starting, Running, Stopping -> Failed
type State string

// The states. Failed means that nobody asked for the end.
const (
	Starting State = "starting"
	Running  State = "running"
	Stopping State = "stopping"
	Exited   State = "exited"
	Failed   State = "failed"
)

// Step names a part of a start.
type Step string

// The steps, in order.
const (
	StepPrepare Step = "prepare" // run folder, plan, boot secret
	StepDisk    Step = "disk"    // workspace disk
	StepShim    Step = "shim"    // shim answers
	StepQEMU    Step = "qemu"    // QEMU's monitor answers
	StepNetwork Step = "network" // the network read back is the one planned
)

// StepEvent tells how a start or stop goes on.
type StepEvent struct {
	Machine string
	Step    Step
	Done    bool          // false: begins
	Took    time.Duration // when Done
}

// StopPhase names a way to end a machine.
type StopPhase string

// The phases, from gentle to hard.
const (
	PhaseAgent StopPhase = "agent" // the agent shuts the guest down
	PhaseACPI  StopPhase = "acpi"  // power button
	PhaseQuit  StopPhase = "quit"  // QEMU is told to end
	PhaseKill  StopPhase = "kill"  // SIGKILL
)

// ExitReason says why QEMU ended.
type ExitReason string

// The reasons.
const (
	ExitGuestShutdown ExitReason = "guest shutdown"
	ExitGuestReset    ExitReason = "guest reset" // also a kernel panic, which the console shows
	ExitQuit          ExitReason = "quit"
	ExitKilled        ExitReason = "killed"
	ExitCrash         ExitReason = "crash"         // QEMU ended by itself
	ExitStart         ExitReason = "failed start"  // the start was given up
	ExitShimDied      ExitReason = "shim vanished" // nobody is left who could say
)

// Exit is how a machine ended.
type Exit struct {
	Version    int        `json:"version"`
	UUID       string     `json:"uuid"`
	Generation uint64     `json:"generation"`
	State      State      `json:"state"` // Exited or Failed
	Reason     ExitReason `json:"reason"`
	Step       Step       `json:"step,omitempty"`   // of the start that failed
	Detail     string     `json:"detail,omitempty"` // one sentence
	Lines      []string   `json:"lines,omitempty"`  // what QEMU or the guest said last, oldest first
	Phase      StopPhase  `json:"phase,omitempty"`  // of the stop that worked
	Time       time.Time  `json:"time"`
}

// A StepError reports the step that failed. Lines holds the last lines of the
// console or of QEMU's complaints, oldest first.
type StepError struct {
	Machine string
	Step    Step
	Err     error
	Lines   []string
	hint    string
}

func (e *StepError) Error() string {
	return fmt.Sprintf("start %s: %s: %v", e.Machine, e.Step, e.Err)
}

func (e *StepError) Unwrap() error { return e.Err }

// Hint is the next thing a person can try, or "".
func (e *StepError) Hint() string {
	if e.hint != "" {
		return e.hint
	}
	return hintFor(e.Err)
}

// hinter is an error that knows its cure.
type hinter interface{ Hint() string }

// A CureError is an error with a hint for the person who meets it.
type CureError struct {
	Err  error
	Cure string
}

func (e *CureError) Error() string { return e.Err.Error() }

func (e *CureError) Unwrap() error { return e.Err }

// Hint is the cure.
func (e *CureError) Hint() string { return e.Cure }
