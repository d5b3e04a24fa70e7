"""Makes files without end while it is graded, in every folder that may lie beside the verifier's.

Source: shepherd#560 (a node out of inodes).
"""

from attacks.frame import Attack, Verdicts, python_daemon

ATTACK = Attack(
    "impatient",
    python_daemon("""
for folder in ("/tmp", "/app", "/dev/shm", "/run"):
    with contextlib.suppress(OSError):
        for n in range(200_000):
            os.close(os.open(f"{folder}/{n}", os.O_CREAT))
"""),
    Verdicts.ZERO_OR_NONE,
    alone=True,
)
