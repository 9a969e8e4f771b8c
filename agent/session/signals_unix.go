//go:build linux || darwin

package session

import "syscall"

// sigContinue makes a stopped program go on.
const sigContinue = syscall.SIGCONT

// signalNames is constant.
var signalNames = []struct {
	name   string
	number syscall.Signal
}{
	{"ABRT", syscall.SIGABRT},
	{"ALRM", syscall.SIGALRM},
	{"FPE", syscall.SIGFPE},
	{"HUP", syscall.SIGHUP},
	{"ILL", syscall.SIGILL},
	{"INT", syscall.SIGINT},
	{"KILL", syscall.SIGKILL},
	{"PIPE", syscall.SIGPIPE},
	{"QUIT", syscall.SIGQUIT},
	{"SEGV", syscall.SIGSEGV},
	{"TERM", syscall.SIGTERM},
	{"USR1", syscall.SIGUSR1},
	{"USR2", syscall.SIGUSR2},
}
