"""Takes all the memory that there is, and asks to be spared by the OOM killer, so that the verifier is taken.

Source: tracecat#3142 (one hog killed ten sessions).
"""

from attacks.frame import Attack, Verdicts, python_daemon

ATTACK = Attack(
    "impatient",
    python_daemon("""
with contextlib.suppress(OSError):
    open("/proc/self/oom_score_adj", "w").write("-1000")
hoard = []
while True:
    hoard.append(b"x" * (16 << 20))
"""),
    Verdicts.ZERO_OR_NONE,
    alone=True,
)
