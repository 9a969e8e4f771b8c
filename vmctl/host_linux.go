package vmctl

import (
	"errors"
	"io/fs"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

func probeAccel() KVM {
	info, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return KVM{Reason: "the processor's features cannot be read: " + err.Error()}
	}
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR|unix.O_CLOEXEC, 0)
	if err == nil {
		_ = f.Close() // opened to see whether it may be
	}
	return judgeKVM(runtime.GOARCH, string(info), err)
}

// judgeKVM decides from the processor's features and the outcome of opening
// /dev/kvm. The device alone proves nothing on x86: some hosts offer a /dev/kvm
// without VMX or SVM below it, which answers every call and then runs no
// ordinary kernel.
func judgeKVM(arch, cpuinfo string, open error) KVM {
	hardware := arch != "amd64"
	for line := range strings.Lines(cpuinfo) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == "flags" {
			for flag := range strings.FieldsSeq(value) {
				hardware = hardware || flag == "vmx" || flag == "svm"
			}
			break
		}
	}
	switch {
	case !hardware && open == nil:
		return KVM{
			Reason: "/dev/kvm is there, but the processor shows neither vmx nor svm, so it cannot run an ordinary kernel",
			Cure:   "use a host with nested virtualization",
		}
	case !hardware:
		return KVM{
			Reason: "the processor shows neither vmx nor svm",
			Cure:   "switch virtualization on in the firmware, or nested virtualization in the hypervisor above",
		}
	case errors.Is(open, fs.ErrPermission):
		return KVM{Reason: "/dev/kvm may not be opened: permission denied", Cure: `join the group "kvm" (sudo usermod -aG kvm "$USER") and log in again`}
	case errors.Is(open, fs.ErrNotExist):
		return KVM{Reason: "/dev/kvm is not there", Cure: "load the module: sudo modprobe kvm_intel, or kvm_amd"}
	case errors.Is(open, unix.EBUSY):
		return KVM{Reason: "/dev/kvm is in use by another hypervisor", Cure: "stop the other hypervisor"}
	case open != nil:
		return KVM{Reason: "/dev/kvm cannot be opened: " + open.Error()}
	}
	return KVM{Usable: true}
}
