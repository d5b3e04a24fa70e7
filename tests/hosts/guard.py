"""Run something and leave nothing of it behind: no process, whatever it forked or daemonized, and no folder.

There are two guards, one below the other: each cleans up when the other is killed.
"""

import contextlib
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from tbench2_env.isolation import syscalls as sc

_SIGNALS_TO_END = (signal.SIGTERM, signal.SIGHUP)


def run_guarded(work: Callable[[], None], folder: Path) -> int:
    """Fork, and let the child do `work`; its exit status. Its descendants and `folder` are then gone."""
    return _guard(lambda: os._exit(_guard(work, folder)), folder)


def _guard(work: Callable[[], None], folder: Path) -> int:
    sc.prctl(sc.PR_SET_CHILD_SUBREAPER, 1)  # whoever loses a parent below comes to us
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's interrupt is for the work to deal with
    for number in _SIGNALS_TO_END:
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        guard = os.getpid()
        pid = os.fork()
        if pid == 0:
            _work(work, guard)
        # Orphans too, as init would: a PID namespace whose process nobody reaps does not go away.
        while (ended := os.waitpid(-1, 0))[0] != pid:
            pass
        code = os.waitstatus_to_exitcode(ended[1])
        return code if code >= 0 else 128 - code
    finally:
        for number in _SIGNALS_TO_END:
            signal.signal(number, signal.SIG_IGN)
        _end_descendants()
        shutil.rmtree(folder, ignore_errors=True)


def _work(work: Callable[[], None], guard: int) -> NoReturn:
    try:
        for number in (signal.SIGINT, *_SIGNALS_TO_END):
            signal.signal(number, signal.SIG_DFL)
        sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() == guard:
            work()
    except SystemExit as ended:
        os._exit(ended.code if isinstance(ended.code, int) else 1)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(125)


def _end_descendants() -> None:
    """Kill our children, and their children, who become ours by that, until there are none."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
            os.waitpid(-1, 0)
