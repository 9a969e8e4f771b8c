/* The smallest first process: one line on the console, then the power goes off.
 * No libc, so that a boot that ends here has nothing in it but QEMU and the kernel. */

static long call(long n, long a, long b, long c, long d)
{
#if defined(__x86_64__)
	long r;
	register long r10 __asm__("r10") = d;
	__asm__ volatile("syscall" : "=a"(r) : "0"(n), "D"(a), "S"(b), "d"(c), "r"(r10) : "rcx", "r11", "memory");
	return r;
#define SYS_WRITE 1
#define SYS_REBOOT 169
#elif defined(__aarch64__)
	register long x8 __asm__("x8") = n;
	register long x0 __asm__("x0") = a;
	register long x1 __asm__("x1") = b;
	register long x2 __asm__("x2") = c;
	register long x3 __asm__("x3") = d;
	__asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3) : "memory");
	return x0;
#define SYS_WRITE 64
#define SYS_REBOOT 142
#endif
}

void _start(void)
{
	static const char line[] = "first line\n";

	call(SYS_WRITE, 1, (long)line, sizeof line - 1, 0);
	call(SYS_REBOOT, 0xfee1dead, 0x28121969, 0x4321fedc, 0);
	for (;;)
		;
}
