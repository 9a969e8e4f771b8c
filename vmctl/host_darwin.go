package vmctl

import "golang.org/x/sys/unix"

// probeAccel asks for the Hypervisor framework.
func probeAccel() KVM {
	if have, err := unix.SysctlUint32("kern.hv_support"); err != nil || have == 0 {
		return KVM{Reason: "the Hypervisor framework is not available on this machine"}
	}
	return KVM{Usable: true}
}
