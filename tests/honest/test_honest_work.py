"""Each piece of work scores 0.0 before it is done and 1.0 afterwards, whatever TB2_TAMPER protects the verifier with.

`TB2_TEST_RUNGS=1,2,4` tries it on these rungs of the isolation ladder; else on the best one here.
"""

from collections.abc import Callable, Iterator

import pytest

from support.server import Server, rungs_under_test
from support.tasks import copy_kit, make_task
from tbench2_env import Tbench2Env

from .works import WORKS, Needs

_TEST = "bash -e /tests/check.sh && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n"
_TOML = "[verifier]\ntimeout_sec = 60\n[environment]\nallow_internet = {internet}\n"
_COMMAND_TIMEOUT_S = 150
_ONE_ID = "one user id only"
GetServer = Callable[[str, str], Server]
CASES = [(name, "report") for name in WORKS]
# What takes long is tried once.
CASES += [(name, "restore") for name, work in WORKS.items() if not work.undone and work.needs is not Needs.DEBIAN]


@pytest.fixture(scope="module")
def get_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GetServer]:
    tasks = tmp_path_factory.mktemp("tasks")
    for name, work in WORKS.items():
        files: dict[str, str | bytes] = {
            "tests/check.sh": work.check + "\n",
            "tests/hidden_test.py": "import settings, thing\n\n\ndef test_it():\n    assert thing.f() == 7\n",
        }
        toml = _TOML.format(internet="true" if work.needs is Needs.DEBIAN else "false")
        copy_kit(make_task(tasks, task_id(name), _TEST, toml=toml, files=files) / "tests/kit")
    servers: dict[tuple[str, str], Server] = {}

    def get(rung: str, tamper: str) -> Server:
        if (rung, tamper) not in servers:
            variables = {
                "TB2_ISOLATION": rung,
                "TB2_TAMPER": tamper,
                "TB2_COMMAND_TIMEOUT_S": str(_COMMAND_TIMEOUT_S),
            }
            servers[rung, tamper] = Server(tmp_path_factory.mktemp("server"), tasks, variables).start()
        return servers[rung, tamper]

    yield get
    for server in servers.values():
        server.assert_idle()
        assert server.stop() == 0


def task_id(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)


@pytest.mark.timeout(_COMMAND_TIMEOUT_S + 150)
@pytest.mark.parametrize(("name", "tamper"), CASES)
@pytest.mark.parametrize("rung", rungs_under_test())
async def test_honest_work(get_server: GetServer, name: str, rung: str, tamper: str) -> None:
    async with get_server(rung, tamper).client(message_timeout_s=_COMMAND_TIMEOUT_S + 100) as env:
        info = (await env.reset(task_id=task_id(name))).observation.info
        if WORKS[name].needs and any(_ONE_ID in lack for lack in info["isolation"]["lacks"]):
            return  # not to be had on this rung, and the server has said so
        assert (await env.evaluate()).reward == 0.0
        await do(env, name)
        verdict = await env.evaluate()
        assert verdict.reward == 1.0, verdict.observation.output


async def do(env: Tbench2Env, name: str) -> None:
    for command in WORKS[name].commands:
        answer = await env.exec(command)
        hint = "; this needs Debian's mirror: is there a network?" if WORKS[name].needs is Needs.DEBIAN else ""
        assert answer.success, f"{command}: {answer.error} {answer.output}{hint}"
        assert answer.info["exit_code"] == 0, f"{command}: {answer.output}{hint}"
