"""The limits of a command: time (CASES.md 16) and output (CASES.md 18)."""

import asyncio
import time

from support.server import Server
from tbench2_env import Tbench2Env


async def started(env: Tbench2Env) -> Tbench2Env:
    await env.reset(task_id="ok")
    return env


# ---------------------------------------------------------------- 16: time
async def test_a_timeout_ends_the_whole_tree_and_says_so(quick_server: Server) -> None:
    async with quick_server.client() as env:
        await started(env)
        begun = time.monotonic()
        answer = await env.exec("echo x>>n; echo so far; setsid sleep 600 & sleep 600")
        assert 2 <= time.monotonic() - begun < 3
        assert not answer.success
        assert answer.info["timed_out"] is True
        assert "timed out after 2 s" in answer.error
        assert answer.output.startswith("so far\n")
        assert "timed out" in answer.output
        assert not answer.done
        assert (await env.exec("wc -l<n; pgrep -c sleep; echo ok")).output == "1\n0\nok\n"


async def test_no_way_of_running_away_outlives_the_timeout(quick_server: Server) -> None:
    runaways = (
        "(setsid nohup sleep 601 >/dev/null 2>&1 &)",
        "setsid bash -c '(setsid sleep 602 &) ; exec sleep 603' &",
        'python3 -c \'import os; [os.fork() and os._exit(0) or os.setsid() for _ in "ab"]; os.system("sleep 604")\'',
        "trap '' TERM INT HUP; (trap '' TERM; sleep 605) & disown",
        "coproc sleep 606",
    )
    async with quick_server.client() as env:
        await started(env)
        answer = await env.exec(
            "\n".join(runaways) + "\nuntil [ $(pgrep -c sleep) = 6 ]; do sleep 0.05; done; echo all; wait; sleep 607"
        )
        assert answer.info["timed_out"]
        assert answer.output.startswith("all\n")
        assert (await env.exec("pgrep -ac sleep")).output == "0\n"


async def test_a_service_of_an_earlier_command_survives_a_timeout(quick_server: Server) -> None:
    async with quick_server.client() as env:
        await started(env)
        await env.exec("sleep 608 & setsid sleep 609 & nohup sleep 610 >/dev/null 2>&1 & true")
        await env.exec("exec sleep 611", session_id="t", block=False)
        assert (await env.exec("sleep 620 & setsid sleep 621")).info["timed_out"]
        assert (await env.exec("pgrep -a sleep | cut -d' ' -f2- | sort")).output == (
            "sleep 608\nsleep 609\nsleep 610\nsleep 611\n"
        )


async def test_a_command_that_ends_in_time_is_no_timeout(quick_server: Server) -> None:
    async with quick_server.client() as env:
        answer = await (await started(env)).exec("sleep 1; echo done")
        assert (answer.output, answer.info["timed_out"]) == ("done\n", False)
        assert 1 <= answer.info["seconds"] < 2


async def test_a_timed_out_command_that_prints_for_ever(quick_server: Server) -> None:
    async with quick_server.client() as env:
        answer = await (await started(env)).exec("yes no end")
        assert answer.info["timed_out"]
        assert answer.output.startswith("no end\nno end\n")
        assert "bytes of output cut" in answer.output
        assert answer.output.rstrip().endswith("]")
        assert (await env.exec("pgrep -c yes")).output == "0\n"


async def test_polite_signals_work_inside(server: Server) -> None:
    """Helpers that ignore SIGTERM must not hand that down: `timeout` and `kill` would do nothing."""
    async with server.client() as env:
        await started(env)
        begun = time.monotonic()
        assert (await env.exec("timeout 0.2 sleep 5; echo rc=$?")).output == "rc=124\n"
        assert (await env.exec("sleep 5 & kill $!; wait $!; echo rc=$?")).output == "rc=143\n"
        assert (await env.exec("trap 'echo caught; exit 4' TERM; kill $$; sleep 5")).output == "caught\n"
        assert time.monotonic() - begun < 4


# ---------------------------------------------------------------- 18: output
async def test_300_mb_of_output_cost_others_nothing(server: Server) -> None:
    async with server.client() as a, server.client() as b:
        await started(a)
        await started(b)
        before = server.rss_bytes()
        noisy = asyncio.create_task(a.exec("echo BEGIN; yes | head -c 300000000; echo END"))
        latencies: list[float] = []
        most = before
        while not noisy.done() or len(latencies) < 20:
            begun = time.monotonic()
            assert (await b.exec("echo hi")).output == "hi\n"
            latencies.append(time.monotonic() - begun)
            most = max(most, server.rss_bytes())
        answer = await noisy
        assert max(latencies) < 1
        assert most - before < 64 << 20
        assert server.rss_bytes() - before < 64 << 20
        assert answer.output.startswith("BEGIN\ny\ny\n")
        assert answer.output.endswith("y\ny\nEND\n")
        limit = 1 << 20
        cut = 300_000_010 - limit
        assert f"\n[... {cut} bytes of output cut ...]\n" in answer.output
        assert limit <= len(answer.output) < limit + 100
        assert answer.info["output_bytes"] == 300_000_010


async def test_output_up_to_the_limit_is_whole(server: Server) -> None:
    async with server.client() as env:
        await started(env)
        answer = await env.exec("head -c 1048576 /dev/zero | tr '\\0' x")
        assert answer.output == "x" * (1 << 20)
        answer = await env.exec("head -c 1048577 /dev/zero | tr '\\0' x")
        assert "[... 1 bytes of output cut ...]" in answer.output
