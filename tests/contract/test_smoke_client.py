"""The other client: it connects, resets, looks around once, and reports failure if anything says so."""

import pytest

from support.server import Server
from tbench2_env import Tbench2Action, Tbench2Env

_LOOK_AROUND = "pwd; whoami; hostname; ls -la"


@pytest.mark.parametrize("scheme", ["http", "ws"])
async def test_what_the_smoke_test_reads(server: Server, scheme: str) -> None:
    async with Tbench2Env(base_url=server.url.replace("http", scheme, 1), message_timeout_s=120.0) as env:
        reset = (await env.reset(task_id="hello-note")).observation
        assert (reset.task_id, reset.success, reset.error) == ("hello-note", True, "")
        assert reset.task_path == str(server.tasks / "hello-note")
        assert reset.instruction == (server.tasks / "hello-note" / "instruction.md").read_text()

        seen = (await env.step(Tbench2Action(action_type="exec", command=_LOOK_AROUND))).observation
        assert (seen.success, seen.error, seen.info["exit_code"]) == (True, "", 0)
        workdir, user, hostname, total, *entries = seen.output.splitlines()
        assert (workdir, user) == ("/app", "root")
        assert hostname
        assert total.startswith("total ")
        assert len(entries) >= 2


@pytest.mark.parametrize(
    ("command", "exit_code", "output"),
    [
        ("exit 3", 3, ""),
        ("false", 1, ""),
        ("echo out; echo err >&2; exit 42", 42, "out\nerr\n"),
        ("no-such-command-anywhere 2>/dev/null", 127, ""),
        ("kill -TERM $$", 143, ""),
    ],
)
async def test_a_command_that_fails_was_still_carried_out(
    server: Server, command: str, exit_code: int, output: str
) -> None:
    async with server.client() as env:
        await env.reset(task_id="hello-note")
        seen = await env.exec(command)
        assert (seen.success, seen.error, seen.output) == (True, "", output)
        assert seen.info["exit_code"] in (exit_code, 128 - exit_code)  # a signal may be told as -15, too
        assert (await env.exec("echo again")).output == "again\n"


async def test_a_command_that_cannot_be_carried_out_says_why(server: Server) -> None:
    async with server.client() as env:
        await env.reset(task_id="hello-note")
        refused = (await env.step(Tbench2Action(action_type="levitate"))).observation
        assert not refused.success
        assert "levitate" in refused.error
        assert (await env.exec("pwd")).success
