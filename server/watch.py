"""A look around each verifier: `tamper`'s report before it runs, and afterwards what it changed itself."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tbench2_env.isolation.process import SandboxError
from tbench2_env.isolation.sandbox import Sandbox
from tbench2_env.isolation.spec import Cover
from tbench2_env.server import cleanstart, threads
from tbench2_env.server.tamper import find_tampered
from tbench2_env.server.tampered import Tampered, printable
from tbench2_env.server.verifier import NoVerdict, Reason

T = TypeVar("T")
#: What `info.tampered` holds; of the rest it has the count.
REPORTED_MAX = 200
_NAMED_IN_DROP = 3


class Watch:
    """What was found at the evaluations of one episode."""

    def __init__(self, sandbox: Sandbox, env: Mapping[str, str], workdir: str, mode: str) -> None:
        """`mode` is that of TB2_TAMPER."""
        self._sandbox, self._env, self._workdir, self._mode = sandbox, dict(env), workdir, mode
        self._found: list[Tampered] = []
        self._of_agent: set[tuple[object, ...]] = set()
        self._of_verifiers: set[tuple[object, ...]] = set()

    def info(self) -> dict[str, Any]:
        """`tampered` of the last evaluation, and `tampered_more`: how many more there are."""
        info: dict[str, Any] = {"tampered": [each.describe() for each in self._found[:REPORTED_MAX]]}
        if len(self._found) > REPORTED_MAX:
            info["tampered_more"] = len(self._found) - REPORTED_MAX
        return info

    async def before(self) -> list[Cover]:
        """Look before a verifier runs, and say what it is not to see.

        Raises: NoVerdict with TB2_TAMPER=drop; SandboxError when the episode is gone.
        """
        try:
            found = await asyncio.to_thread(self._scan)
        except OSError as error:
            raise _unreadable(error) from error
        fresh = [each for each in found if each.identity not in self._of_verifiers]
        self._of_agent = {each.identity for each in fresh}
        self._found = [each for each in fresh if not each.quiet]
        if self._found and self._mode == "drop":
            paths = ", ".join(printable(each.change.path) for each in self._found[:_NAMED_IN_DROP])
            more = f" and {len(self._found) - _NAMED_IN_DROP} more" if len(self._found) > _NAMED_IN_DROP else ""
            raise NoVerdict(Reason.TAMPERED, f"no verdict: what verifiers trust was changed: {paths}{more}")
        return self._covers(fresh)

    async def after(self, judge: Callable[[], T]) -> T:
        """The verifier has ended: `judge` in a thread, which then remembers what the verifier changed itself.

        At once and not when the episode is evaluated again, since all that the agent changes from now on is its own.
        Raises: what `judge` raises; SandboxError when the episode is gone.
        """

        def work() -> T:
            try:
                return judge()
            finally:
                self._of_verifiers = {each.identity for each in self._scan()} - self._of_agent

        try:
            return await threads.finish(work)
        except OSError as error:
            raise _unreadable(error) from error

    def _covers(self, found: list[Tampered]) -> list[Cover]:
        shared = cleanstart.Shared(self._env.get("HOME", "/root"), self._workdir)
        try:
            return cleanstart.covers(found, shared, restore=self._mode == "restore")
        except cleanstart.CannotHide as error:
            path = printable(str(error))
            message = f"no verdict: a verifier must not see {path}, and it cannot be hidden as it is"
            raise NoVerdict(Reason.TAMPERED, message) from None

    def _scan(self) -> list[Tampered]:
        """Blocks. Raises: OSError."""
        if not self._sandbox.has_worktree:
            return []
        with self._sandbox.worktree(thorough=True) as worktree:
            return find_tampered(worktree, self._env, self._workdir)


def _unreadable(error: OSError) -> SandboxError:
    return SandboxError(f"the episode's worktree cannot be read: {error}")
