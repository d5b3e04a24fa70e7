"""One bad episode must not hurt another: CASES.md 1 to 4 over the real server."""

import asyncio
import time

from support.server import Server


async def test_two_episodes_of_one_task_have_their_own_files(server: Server) -> None:
    async with server.client() as a, server.client() as b:
        await a.reset(task_id="ok")
        await b.reset(task_id="ok")
        before = (await b.exec("ls -A")).output
        await a.exec("echo A > f; mkdir d; rm -rf /etc/skel; echo x > /usr/local/bin/x1")
        assert (await b.exec("cat f /usr/local/bin/x1")).output.count("No such file") == 2
        assert (await b.exec("ls -d /etc/skel")).output.strip() == "/etc/skel"
    async with server.client() as c:
        await c.reset(task_id="ok")
        assert (await c.exec("ls -A")).output == before


async def test_32_episodes_of_one_task_get_their_own_verdicts(server: Server) -> None:
    async def play(number: int) -> float | None:
        async with server.client() as env:
            await env.reset(task_id="ok")
            if number % 2 == 0:
                await env.exec("echo ok > out.txt")
            return (await env.evaluate()).reward

    begun = time.monotonic()
    rewards = await asyncio.gather(*(play(number) for number in range(32)))
    assert rewards == [1.0, 0.0] * 16
    assert time.monotonic() - begun < 20
