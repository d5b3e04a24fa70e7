"""Named terminals over the server: block=false, write, view, wait, kill."""

import asyncio
import time
from typing import Any

import pytest

from support.server import Server
from tbench2_env import Tbench2Action, Tbench2Env
from tbench2_env.models import Tbench2Observation
from tbench2_env.server.actions import WAIT_MAX_S
from tbench2_env.server.terminal import TERMINALS_MAX


async def act(env: Tbench2Env, action_type: str, session_id: str | None = "t", **more: Any) -> Tbench2Observation:
    action = Tbench2Action(action_type=action_type, session_id=session_id, **more)
    return (await env.step(action)).observation


async def start(env: Tbench2Env, command: str, session_id: str | None = "t") -> Tbench2Observation:
    await env.reset(task_id="ok")
    return await act(env, "exec", session_id, command=command, block=False)


async def until(env: Tbench2Env, text: str, answer: Tbench2Observation, within_s: float = 10.0) -> str:
    """What the terminal of `answer` has printed when `text` is in it: an answer does not wait for a slow program."""
    seen, deadline = answer.output, time.monotonic() + within_s
    while text not in seen:
        assert time.monotonic() < deadline, seen
        await asyncio.sleep(0.02)
        seen += (await act(env, "view", answer.session_id)).output
    return seen


async def sleepers(env: Tbench2Env, count: int) -> None:
    """Wait until `count` processes of the episode sleep."""
    waiting = f"for i in $(seq 250); do [ $(pgrep -c sleep) = {count} ] && break; sleep 0.02; done; pgrep -c sleep"
    assert (await env.exec(waiting)).output == f"{count}\n"


async def test_a_program_runs_on_a_terminal_of_its_own(server: Server) -> None:
    async with server.client() as env:
        answer = await start(env, "tty; [ -t 0 ] && [ -t 1 ] && [ -t 2 ] && echo all three; echo x >/dev/tty; pwd")
        assert await until(env, "/app\r\n", answer) == "/dev/pts/0\r\nall three\r\nx\r\n/app\r\n"
        assert (answer.success, answer.session_id, answer.action_type) == (True, "t", "exec")


async def test_exec_without_blocking_returns_at_once(server: Server) -> None:
    async with server.client() as env:
        await env.reset(task_id="ok")
        begun = time.monotonic()
        answer = await act(env, "exec", command="echo up; sleep 600", block=False)
        assert time.monotonic() - begun < 2
        assert await until(env, "\n", answer) == "up\r\n"
        await sleepers(env, 1)


async def test_python_is_typed_to(server: Server) -> None:
    async with server.client() as env:
        await until(env, ">>> ", await start(env, "python3 -i"))
        await until(env, "\r\n42\r\n", await act(env, "write", command="6*7"))
        await act(env, "write", command="import os; x = os.getpid()")
        await until(env, "True", await act(env, "write", command="x == os.getpid()"))
        await act(env, "write", command="exit()")
        assert (await act(env, "wait", wait_seconds=5)).success
        assert "has ended" in (await act(env, "write", command="1")).error


async def test_an_interactive_shell_keeps_its_state_and_takes_control_c(server: Server) -> None:
    async with server.client() as env:
        await start(env, "")
        await act(env, "write", command="cd /etc; x=5; PS1='ready> '")
        await until(env, "/etc 5", await act(env, "write", command="echo $PWD $x"))
        await act(env, "write", command="sleep 600")
        await sleepers(env, 1)
        await until(env, "ready> ", await act(env, "write", command="\x03"))
        await sleepers(env, 0)
        await until(env, "130", await act(env, "write", command="echo $?"))


async def test_control_characters_are_typed_without_a_newline(server: Server) -> None:
    async with server.client() as env:
        await start(env, "cat; echo eof=$?")
        twice = "one\r\none\r\n"
        assert await until(env, twice, await act(env, "write", command="one")) == twice
        await until(env, "eof=0", await act(env, "write", command="\x04"))


async def test_view_answers_what_is_new(server: Server) -> None:
    async with server.client() as env:
        await start(
            env, "until [ -e go ]; do sleep 0.02; done; echo first; until [ -e on ]; do sleep 0.02; done; echo b"
        )
        assert (await act(env, "view")).output == ""
        await env.exec("touch go")
        assert await until(env, "\n", await act(env, "view")) == "first\r\n"
        assert (await act(env, "view")).output == ""
        await env.exec("touch on")
        assert await until(env, "\n", await act(env, "view")) == "b\r\n"


async def test_wait_ends_with_the_program_or_with_the_time(server: Server) -> None:
    async with server.client() as env:
        await start(env, "echo one; sleep 600")
        begun = time.monotonic()
        await act(env, "wait", wait_seconds=0.5)
        assert 0.5 <= time.monotonic() - begun < 2
        await act(env, "kill")
        await act(env, "exec", command="until [ -e go ]; do sleep 0.02; done; echo two", block=False)
        await env.exec("(sleep 0.5; touch go) &")
        begun = time.monotonic()
        assert (await act(env, "wait", wait_seconds=60)).output == "two\r\n"
        assert time.monotonic() - begun < 5
        assert (await act(env, "wait")).success, "without a time, wait does not wait"


@pytest.mark.parametrize("seconds", [-1, WAIT_MAX_S + 1, 1e300])
async def test_a_wait_without_end_is_refused(server: Server, seconds: float) -> None:
    async with server.client() as env:
        await start(env, "sleep 600")
        answer = await act(env, "wait", wait_seconds=seconds)
        assert not answer.success
        assert "wait_seconds" in answer.error


async def test_kill_ends_all_that_the_program_started(server: Server) -> None:
    async with server.client() as env:
        await start(env, "sleep 600 & setsid sleep 601 & (setsid sleep 602 &); trap '' HUP TERM; sleep 603")
        await sleepers(env, 4)
        assert (await act(env, "kill")).success
        count = "pgrep -c 'bash|sleep' >n; [ $(<n) = 1 ] && break"
        gone = await env.exec(f"for i in $(seq 250); do {count}; sleep 0.02; done; cat n")
        assert gone.output == "1\n"
        assert not (await act(env, "view")).success


async def test_names(server: Server) -> None:
    async with server.client() as env:
        await start(env, "cat", "one")
        unknown = await act(env, "write", "two", command="x")
        assert (unknown.success, "'two'" in unknown.error, "'one'" in unknown.error) == (False, True, True)
        busy = await act(env, "exec", "one", command="cat", block=False)
        assert (busy.success, "busy" in busy.error) == (False, True)
        for action_type in ("write", "view", "wait", "kill"):
            nameless = await act(env, action_type, None)
            assert (nameless.success, "session_id" in nameless.error) == (False, True)
        assert not (await act(env, "exec", "n" * 300, command="cat", block=False)).success
        strange = "näme with 'quotes' and\nlines"
        assert await until(env, "\n", await act(env, "exec", strange, command="echo hi", block=False)) == "hi\r\n"
        assert (await act(env, "kill", strange)).success
        # Without a name it is the default terminal's.
        await act(env, "exec", None, command="cat", block=False)
        assert (await act(env, "write", "tb2-session", command="hey")).output.startswith("hey")


async def test_the_name_of_an_ended_program_is_free_again(server: Server) -> None:
    async with server.client() as env:
        assert await until(env, "\n", await start(env, "echo first")) == "first\r\n"
        assert (await act(env, "wait", wait_seconds=5)).success
        second = await act(env, "exec", command="echo second", block=False)
        assert await until(env, "\n", second) == "second\r\n"


async def test_terminals_are_limited_and_a_killed_one_makes_room(server: Server) -> None:
    async with server.client() as env:
        await env.reset(task_id="ok")
        for number in range(TERMINALS_MAX):  # ended programs are quick to start, and count until they are killed
            assert (await act(env, "exec", f"t{number}", command="true", block=False)).success
        refused = await act(env, "exec", "more", command="cat", block=False)
        assert (refused.success, str(TERMINALS_MAX) in refused.error) == (False, True)
        await act(env, "kill", "t3")
        assert await until(env, "\n", await act(env, "exec", "more", command="echo in", block=False)) == "in\r\n"


async def test_two_terminals_are_apart(server: Server) -> None:
    async with server.client() as env:
        await env.reset(task_id="ok")
        for name in ("a", "b"):
            await act(env, "exec", name, command="cat", block=False)
        twice = "for a\r\nfor a\r\n"
        assert await until(env, twice, await act(env, "write", "a", command="for a")) == twice
        assert (await act(env, "view", "b")).output == ""


async def test_escapes_of_a_full_screen_program_are_stripped(server: Server) -> None:
    async with server.client() as env:
        start_up = r"\033[?1049h\033[22;0;0t\033[1;24r\033(B\033[m\033[2J\033[H\033]0;vim\007"
        screen = f"printf '{start_up}~ file\\033[24;1H-- INSERT --\\033[?25h'"
        assert await until(env, "INSERT --", await start(env, screen)) == "~ file-- INSERT --"


async def test_a_program_that_prints_without_end_does_not_hold_up_the_answer(server: Server) -> None:
    async with server.client() as env:
        begun = time.monotonic()
        answer = await start(env, "yes")
        assert (await until(env, "y\r\ny\r\n", answer)).startswith("y\r\ny\r\n")
        assert time.monotonic() - begun < 4
        begun = time.monotonic()
        assert (await act(env, "view")).success
        assert (await env.exec("echo hi")).output == "hi\n"
        assert time.monotonic() - begun < 2


async def test_what_a_program_never_reads_is_an_error_in_time(server: Server) -> None:
    async with server.client() as env:
        await start(env, "stty raw -echo; sleep 600")
        begun = time.monotonic()
        answer = await act(env, "write", command="x" * 200_000)
        assert not answer.success
        assert "does not read" in answer.error
        assert time.monotonic() - begun < 8
        assert (await act(env, "kill")).success


async def test_terminals_do_not_outlive_a_reset(server: Server) -> None:
    async with server.client() as env:
        await start(env, "sleep 600")
        await env.reset(task_id="ok")
        assert not (await act(env, "view")).success
        assert (await env.exec("pgrep -c sleep")).output == "0\n"
