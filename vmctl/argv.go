package vmctl

import (
	"fmt"
	"strings"

	"helix.local/helix/vmctl/image"
)

// machineKind tells apart the two families of boards.
type machineKind struct {
	name string // QEMU machine type with its options
	bus  string // suffix of virtio devices: "device" on MMIO, "pci"
	tty  string // console of the guest's kernel
}

// qemuArgs writes QEMU's command line. Nothing in it is secret: the boot secret
// is a file that only QEMU and its owner can read.
func qemuArgs(m Machine, h Host, p Plan) (machine string, args []string) {
	kind := boardFor(m, h, p.Accel)
	accel := p.Accel
	if accel == "tcg" {
		accel = "tcg,thread=multi"
	}
	args = []string{
		"-name", "guest=" + m.Name + ",process=helix-vm-" + m.Name,
		"-uuid", m.UUID,
		"-no-user-config", "-nodefaults", "-display", "none",
		"-no-reboot", // a reset would replay the one-time boot secret
		"-S",         // nothing runs before the network has been checked
		"-machine", kind.name,
		"-accel", accel,
	}
	if cpu := cpuFor(h, p.Accel); cpu != "" {
		args = append(args, "-cpu", cpu)
	}
	args = append(args, "-smp", fmt.Sprint(m.CPUs), "-m", fmt.Sprint(m.MemoryMB))
	if h.OS == "linux" {
		args = append(args, "-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny")
	}
	args = append(args,
		"-kernel", m.Image.Kernel,
		"-initrd", m.Image.Initramfs,
		"-append", kernelLine(kind, h, p.Accel),
		"-fw_cfg", "name="+BootItem+",file="+escape(p.Files.Boot),
		"-chardev", "socket,id=qmp,path="+escape(p.Sockets.QMP)+",server=on,wait=off",
		"-mon", "chardev=qmp,mode=control",
		"-chardev", "socket,id=console,path="+escape(p.Sockets.Console),
		"-serial", "chardev:console",
		"-device", "virtio-serial-"+kind.bus,
		"-chardev", "socket,id=control,path="+escape(p.Sockets.Serial)+",server=on,wait=off",
		"-device", "virtserialport,chardev=control,name="+ControlPort,
		"-drive", "if=none,id=workspace,format=raw,discard=unmap,detect-zeroes=unmap,file="+escape(p.Disk.Path),
		"-device", "virtio-blk-"+kind.bus+",drive=workspace,serial=workspace",
		"-netdev", "stream,id="+p.Network.NetDev+",server=off,addr.type=unix,addr.path="+escape(p.Sockets.Net),
		"-device", fmt.Sprintf("virtio-net-%s,id=%s,netdev=%s,mac=%s,host_mtu=%d", kind.bus, p.Network.NIC, p.Network.NetDev, p.Network.MAC, p.Network.MTU),
		"-device", "virtio-rng-"+kind.bus,
	)
	return strings.SplitN(kind.name, ",", 2)[0], args
}

// boardFor picks microvm where it works: it boots in half the time of q35, which
// is needed where the accelerator or the kernel wants real firmware.
func boardFor(m Machine, h Host, accel string) machineKind {
	switch {
	case h.Arch == "arm64":
		name := "virt,gic-version=max"
		if accel == "tcg" {
			name = "virt,gic-version=3"
		}
		return machineKind{name: name, bus: "pci", tty: "ttyAMA0"}
	case h.OS == "linux" && m.Image.Meta.KernelFormat == image.FormatPVH && (accel == "kvm" || h.TSCKHz > 0):
		// Without pit=off the kernel compares the TSC with a timer that emulation
		// makes late, and gives the TSC up. Without the PIT it has no other clock to
		// measure the TSC with, so under TCG the frequency must be known.
		return machineKind{
			name: "microvm,acpi=on,pit=off,pic=off,rtc=on,isa-serial=on,auto-kernel-cmdline=off,x-option-roms=off",
			bus:  "device", tty: "ttyS0",
		}
	}
	return machineKind{name: "q35,usb=off,vmport=off,smbus=off", bus: "pci", tty: "ttyS0"}
}

func cpuFor(h Host, accel string) string {
	switch {
	case accel == "kvm" || accel == "hvf":
		return "host"
	case h.Arch == "arm64":
		return "cortex-a72"
	case accel == "whpx":
		return "qemu64"
	}
	return "" // QEMU's default: emulating newer features only costs time
}

// kernelLine is the guest kernel's command line. It can be read by everybody in
// the guest.
func kernelLine(kind machineKind, h Host, accel string) string {
	words := []string{"console=" + kind.tty, "quiet", "loglevel=4", "panic=-1", "rdinit=/init", "random.trust_cpu=on", "rcupdate.rcu_expedited=1", "cryptomgr.notests"}
	if kind.tty == "ttyS0" {
		words = append(words, "reboot=t", "8250.nr_uarts=1", "i8042.noaux", "i8042.nokbd")
	}
	if accel == "tcg" {
		// Emulated code is not speculated, so these cost time and give nothing.
		words = append(words, "mitigations=off", "nokaslr")
	}
	if kind.bus == "device" {
		words = append(words, "pci=off")
	}
	if accel == "tcg" && kind.bus == "device" {
		words = append(words, "no_timer_check", "tsc=reliable", fmt.Sprintf("tsc_early_khz=%d", h.TSCKHz))
	}
	return strings.Join(words, " ")
}

// escape doubles the commas of a value in QEMU's option syntax.
func escape(value string) string { return strings.ReplaceAll(value, ",", ",,") }
