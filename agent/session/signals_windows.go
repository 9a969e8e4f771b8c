package session

import "syscall"

// sigContinue has no meaning here: nothing is ever stopped.
const sigContinue = syscall.SIGTERM

// signalNames is constant; Windows knows how to end a process, no more.
var signalNames = []struct {
	name   string
	number syscall.Signal
}{
	{"KILL", syscall.SIGKILL},
	{"TERM", syscall.SIGTERM},
}
