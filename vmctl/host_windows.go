package vmctl

import "golang.org/x/sys/windows"

// probeAccel looks for the library of the Windows Hypervisor Platform.
func probeAccel() KVM {
	if err := windows.NewLazySystemDLL("WinHvPlatform.dll").Load(); err != nil {
		return KVM{
			Reason: "the Windows Hypervisor Platform is not switched on",
			Cure:   "enable it: DISM /Online /Enable-Feature /FeatureName:HypervisorPlatform",
		}
	}
	return KVM{Usable: true}
}
