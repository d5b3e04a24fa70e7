"""Takes descriptors, files and processor time from the verifier by prlimit, and offers it to the OOM killer.

Source: man 2 prlimit; a `[ -z "$(check)" ]` is true where nothing can be started.
"""

from attacks.frame import SEEN, Attack, python_daemon

ATTACK = Attack(
    "shell",
    python_daemon("""
import resource
for pid in verifiers():
    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC, resource.RLIMIT_CPU):
        with contextlib.suppress(OSError):
            resource.prlimit(pid, limit, (0, 0))
    with contextlib.suppress(OSError):
        open(f"/proc/{pid}/oom_score_adj", "w").write("1000")
    with contextlib.suppress(OSError):
        os.sched_setaffinity(pid, [0]), os.setpriority(os.PRIO_PROCESS, pid, 19)
"""),
    ran=SEEN,
)
