//go:build !linux && !darwin && !windows

package vmctl

// probeAccel knows no acceleration of other systems.
func probeAccel() KVM {
	return KVM{Reason: "no hardware acceleration is known for this operating system"}
}
