"""One campaign for each setting of a server: all its attacks, many at a time. The tests look at what came of each."""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from support.server import Server, rungs_under_test

from .fixture_tasks import make_all
from .frame import Attack, Outcome, Tamper, carry_out, load

ATTACKS = load()
#: Attacks made at the same time: enough to fill the waiting of one with the work of others.
_AT_ONCE = 5


@dataclass(frozen=True)
class Setting:
    """The rung of the isolation ladder (`auto`: the best one here) and TB2_TAMPER."""

    rung: str
    tamper: Tamper = Tamper.REPORT

    def __str__(self) -> str:
        return f"rung-{self.rung}-{self.tamper}"

    def includes(self, attack: Attack) -> bool:
        """What tampers with nothing is the same to every TB2_TAMPER, so it is tried with the default only."""
        return self.tamper is Tamper.REPORT or bool(attack.tampers)


RUNGS = rungs_under_test()
SETTINGS = [*(Setting(rung) for rung in RUNGS), Setting(RUNGS[0], Tamper.DROP), Setting(RUNGS[0], Tamper.RESTORE)]
#: Outcomes by attack.
Campaign = Callable[[Setting], dict[str, Outcome]]


@pytest.fixture(scope="session")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    """What came of every attack in a setting; the attacks are made when it is first asked for."""
    done: dict[Setting, dict[str, Outcome]] = {}

    def outcomes(setting: Setting) -> dict[str, Outcome]:
        if setting not in done:
            done[setting] = _attack_all(setting, tmp_path_factory)
        return done[setting]

    return outcomes


def _attack_all(setting: Setting, folders: pytest.TempPathFactory) -> dict[str, Outcome]:
    secret = f"SECRET-{secrets.token_hex(12)}"
    tasks = folders.mktemp("tasks")
    make_all(tasks, secret)
    env = {"TB2_ISOLATION": setting.rung, "TB2_TAMPER": setting.tamper}
    server = Server(folders.mktemp("server"), tasks, env).start()
    try:
        return asyncio.run(_carry_out_all(setting, server, secret))
    finally:
        server.assert_idle(within_s=10)
        assert server.stop() == 0


async def _carry_out_all(setting: Setting, server: Server, secret: str) -> dict[str, Outcome]:
    chosen = {name: attack for name, attack in ATTACKS.items() if setting.includes(attack)}
    at_once = asyncio.Semaphore(_AT_ONCE)
    outcomes: dict[str, Outcome] = {}

    async def one(name: str) -> None:
        async with at_once:
            outcomes[name] = await carry_out(chosen[name], server, secret)

    await asyncio.gather(*(one(name) for name, attack in chosen.items() if not attack.alone))
    for name, attack in chosen.items():
        if attack.alone:
            await one(name)
    return outcomes
