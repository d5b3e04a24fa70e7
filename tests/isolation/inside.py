"""Processes that are started as the helpers start them, by programs, and PID namespaces to start them in."""

import os
import signal
from collections.abc import Sequence

from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.program import Program
from tbench2_env.isolation.start import Started, Starter

#: Their memory must stay.
_kept: list[Started] = []


def start_namespace() -> tuple[int, int]:
    """A PID namespace with nothing but its first process: (that one's pid, descriptor of the namespace)."""
    pid, pidfd = sc.clone(sc.CLONE_NEWPID)
    if pid == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pause()
    os.close(pidfd)
    return pid, os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)


def execute(program: Program, *argv: str) -> Program:
    """Let the program end as a command does, with no signal blocked."""
    program.call("rt_sigprocmask", signal.SIG_SETMASK, program.data(bytes(8)), 0, 8)
    texts = [each.encode() for each in argv]
    program.call("execve", program.text(texts[0]), program.vector(texts), program.vector([]))
    return program


def start_into(starter: Starter, program: Program, passed: Sequence[int], namespace: int, aside: bool) -> Started:
    """Start it in a PID namespace, in either way."""
    if aside:
        return starter.start(program, passed, aside_into=namespace)
    sc.setns(namespace, sc.CLONE_NEWPID)
    return starter.start(program, passed)


def run_inside(namespace: int, script: str, *passed: int) -> int:
    """Run `script` as commands run: a session leader and subreaper. Answers with its pid."""
    program = Program()
    program.call("prctl", sc.PR_SET_CHILD_SUBREAPER, 1)
    program.call("setsid")
    _kept.append(Starter().start(execute(program, "/bin/bash", "-c", script), passed, aside_into=namespace))
    return _kept[-1].pid
