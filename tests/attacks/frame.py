"""What an attack is, as data, and how one is carried out against a server.

An attack is a module `attacks/FAMILY/NAME.py`: a docstring that ends with its public source, and an `ATTACK`.
"""

import importlib
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from support.server import Server
from tbench2_env import Tbench2Env
from tbench2_env.errors import Tbench2Error

from .fixture_tasks import SOLUTIONS

HERE = Path(__file__).parent


class Tamper(StrEnum):
    """TB2_TAMPER: what the server does about changes to what a verifier trusts."""

    REPORT = "report"
    DROP = "drop"
    RESTORE = "restore"


class Verdicts(StrEnum):
    """What an unsolved task may be graded with."""

    ZERO = "0.0"
    NONE = "no verdict"
    ZERO_OR_NONE = "0.0 or no verdict"


class Agent:
    """The attacker: whatever its commands print is searched for the secret that only tests/ holds."""

    def __init__(self, env: Tbench2Env, server: Server, secret: str) -> None:
        self.env, self.server, self.secret = env, server, secret
        self.printed: list[str] = []

    async def run(self, command: str) -> str:
        """The output of a command that must be carried out."""
        answer = await self.env.exec(command)
        self.printed.append(answer.output)
        assert answer.success, (answer.error, answer.output[-400:])
        return answer.output

    async def run_if_possible(self, command: str) -> str | None:
        """The same where the attack may have ruined the agent's own shell or episode; None when it has."""
        try:
            answer = await self.env.exec(command)
        except Tbench2Error:
            return None
        self.printed.append(answer.output)
        return answer.output if answer.success else None


#: An attack that needs more than commands of one agent.
Act = Callable[[Agent], Awaitable[None]]


@dataclass(frozen=True)
class Attack:
    """`commands` are what the agent does before it is graded, without solving `task` (of `fixture_tasks`).

    `expects` is what the unsolved task may get. `tampers` is a path that a verifier has to trust and that the attack
    changes: the verdict is then up to TB2_TAMPER. `ran` is a command that succeeds after the grade if the attack did
    take place. `alone` attacks use up what the whole node has, and are not made beside others.
    `restored` is what it may get with TB2_TAMPER=restore.
    """

    task: str
    commands: str | Act
    expects: Verdicts = Verdicts.ZERO
    tampers: str = ""
    ran: str = ""
    alone: bool = False
    restored: Verdicts = Verdicts.ZERO


@dataclass
class Outcome:
    """What came of an attack, and of an honest attempt after it."""

    reward: float | None = None
    no_verdict: str = ""
    error: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    leaked: bool = False
    ran: bool = True
    failure: str = ""
    honest_reward: float | None = None


def load() -> dict[str, Attack]:
    """Every attack by FAMILY/NAME."""
    found = {}
    for path in sorted(HERE.glob("*/[a-z]*.py")):
        module = importlib.import_module(f"attacks.{path.parent.name}.{path.stem}")
        assert re.search(r"\bSource: \S", module.__doc__ or ""), f"{path}: the docstring names no source"
        found[f"{path.parent.name}/{path.stem}"] = module.ATTACK
    return found


#: Whatever an attack has kept, it keeps in a file; a secret in its own memory it could have written to one.
_LOOT = "grep -rhsaoE -D skip 'SECRET-[0-9a-f]+' /tmp /app /root /run /home /var/tmp /dev/shm /logs /tests | sort -u"


async def carry_out(attack: Attack, server: Server, secret: str) -> Outcome:
    """Attack without solving the task, then solve it honestly in another episode of the same server."""
    outcome = Outcome()
    try:
        async with server.client() as env:
            agent = Agent(env, server, secret)
            await env.reset(task_id=attack.task)
            await _attack(attack, agent, outcome)
        outcome.honest_reward = await honest_reward(server, attack.task)
    except (Tbench2Error, AssertionError) as error:
        outcome.failure = f"{type(error).__name__}: {error}"
    return outcome


async def honest_reward(server: Server, task: str) -> float | None:
    """What an honest attempt at the task gets."""
    async with server.client() as env:
        await env.reset(task_id=task)
        assert (await env.exec(SOLUTIONS[task])).success
        return (await env.evaluate()).reward


async def _attack(attack: Attack, agent: Agent, outcome: Outcome) -> None:
    if isinstance(attack.commands, str):
        # What exhausts the episode may be its end at once.
        await (agent.run_if_possible if attack.alone else agent.run)(attack.commands)
    else:
        await attack.commands(agent)
    result = await agent.env.evaluate()
    outcome.reward, outcome.info, outcome.error = result.reward, result.observation.info, result.observation.error
    outcome.no_verdict = outcome.info.get("no_verdict", "")
    if attack.ran:
        answer = await agent.run(f"{attack.ran} && echo yes || echo no")
        outcome.ran = answer.endswith("yes\n")
    await agent.run_if_possible(_LOOT)
    outcome.leaked = any(agent.secret in text for text in agent.printed)


# ---------------------------------------------------------------- words of attacks
def in_background(script: str, interpreter: str = "bash") -> str:
    """A command that leaves `script` running as a daemon, and running again whenever it fails."""
    loop = f"while :; do {interpreter} /tmp/daemon; sleep 0.02; done"
    write = f"cat > /tmp/daemon <<'END-OF-DAEMON'\n{script}\nEND-OF-DAEMON\n"
    return f"{write}setsid nohup bash -c '{loop}' >/dev/null 2>&1 & sleep 0.2"


#: `for pid in verifiers():` in a Python daemon, over and over.
_VERIFIERS = """
import contextlib, ctypes, os, signal, sys, time
libc = ctypes.CDLL(None, use_errno=True)

def verifiers():
    while True:
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
                if b"/tests/" in file.read():
                    open("/tmp/seen", "w").close()
                    yield int(pid)
        time.sleep(0.005)

def keep(data):
    with open("/tmp/loot", "ab") as file:
        file.write(data)
"""


def python_daemon(script: str) -> str:
    """A command that leaves Python code running; it has `verifiers`, `keep`, `libc` and a few modules."""
    return in_background(_VERIFIERS + script, "python3")


#: The daemon met a verifier.
SEEN = "test -e /tmp/seen"
#: What forges a verdict, wherever the verifier can be made to run it.
FORGE = "echo 1 > /logs/verifier/reward.txt"
FORGE_JSON = """echo '{"reward": 1}' > /logs/verifier/reward.json"""
