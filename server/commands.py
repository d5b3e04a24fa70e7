"""What an agent does in its sandbox: command lines, terminals, and files that it writes."""

from typing import Any

from tbench2_env.isolation.sandbox import Sandbox
from tbench2_env.server import shell
from tbench2_env.server.actions import Answer
from tbench2_env.server.ending import CheckAlive
from tbench2_env.server.services import Services
from tbench2_env.server.terminal import Terminals


class Commands:
    """The commands of one agent, `caller`; `close` lets go of what they left open.

    What is asked of it raises SandboxError, and TerminalError where there are terminals.
    """

    def __init__(self, services: Services, sandbox: Sandbox, caller: shell.Caller, check_alive: CheckAlive) -> None:
        self._services, self._sandbox, self._caller, self._check_alive = services, sandbox, caller, check_alive
        self._runner = shell.Runner(services.settings.output_limit_bytes)
        self.terminals = Terminals(services.settings.output_limit_bytes)

    async def run(self, command: str, timeout_s: float) -> Answer:
        spec = self._caller.script()
        with shell.in_memory(_script(command), "command") as script, self._services.metrics.timed("exec"):
            result = await self._runner.run(lambda fds: self._sandbox.start(spec, fds), timeout_s, script)
        await self._check_alive(result.exit_code)
        hits = self._sandbox.take_hits()
        info: dict[str, Any] = {
            "exit_code": result.exit_code,
            "timed_out": result.timed_out,
            "seconds": round(result.seconds, 6),
            "output_bytes": result.output_bytes,
        }
        if hits:
            info["limits_hit"] = hits
        problems = list(hits.values())
        if result.timed_out:
            problems.insert(0, f"the command timed out after {timeout_s:g} s and was killed with all it had started")
        if not problems:
            return Answer(result.output, info=info)
        error = "; ".join(problems)
        # A command that came to its own good end in spite of a limit was carried out.
        output, done = f"{result.output}\n[{error}]\n", result.exit_code == 0 and not result.timed_out
        return Answer(output, success=done, error=error, info=info)

    async def start(self, name: str, command: str) -> Answer:
        """In a new terminal; an interactive shell when there is no command."""
        if not command:
            return Answer(await self.terminals.start(name, self._sandbox, self._caller.interactive(), ()))
        spec = self._caller.script(tty=True)
        with shell.in_memory(_script(command), "command") as script:
            return Answer(await self.terminals.start(name, self._sandbox, spec, (script,)))

    async def write_file(self, path: str, content: str) -> Answer:
        spec = self._caller.write(path)
        with shell.in_memory(content.encode("utf-8", errors="surrogatepass"), "content") as data:
            result = await self._runner.run(
                lambda fds: self._sandbox.start(spec, fds), self._services.settings.command_timeout_s, data
            )
        await self._check_alive(result.exit_code)
        if result.timed_out or result.exit_code != 0:
            why = "timed out" if result.timed_out else result.output.strip() or f"exit code {result.exit_code}"
            return Answer(success=False, error=f"file_path {path}: cannot be written: {why}")
        return Answer(f"Wrote content to {path}")

    def close(self) -> None:
        self.terminals.close()
        self._runner.close()


def _script(command: str) -> bytes:
    """bash drops NUL bytes from scripts it reads; `read` would stop at the first instead."""
    return command.replace("\0", "").encode("utf-8", errors="surrogatepass")
