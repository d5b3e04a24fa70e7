import asyncio
import io
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.talk import soon
from tbench2_env import (
    BadRequest,
    CapacityReached,
    ConnectionClosed,
    EpisodeBusy,
    EpisodeEnded,
    ReplyTimeout,
    ServerGone,
    Tbench2Action,
    Tbench2Env,
    Tbench2Error,
    Tbench2HttpEnv,
    UnknownEpisode,
    UnknownTask,
)

Serve = Callable[..., Any]

AT_ONCE_S = 2.0
LONG_S = 30.0


async def noticed_by(site: Any) -> bool:
    return bool(await asyncio.to_thread(site.lost.acquire, timeout=AT_ONCE_S))


def assert_no_threads() -> None:
    """A request's thread still has to end itself when its reply is there."""
    for thread in threading.enumerate():
        if thread.name.startswith("tbench2-env"):
            thread.join(AT_ONCE_S)
            assert not thread.is_alive()


def hang_on(*routes: str) -> Callable[[Any], None]:
    """Never answer these requests, each time; the rest as usual."""

    def script(asked: Any) -> None:
        if f"{asked.command} {asked.route}" in routes:
            asked.data()
            asked.wait_until_lost()
        else:
            asked.serve_episode()

    return script


def fail_first(route: str, *failures: Callable[[Any], None]) -> Callable[[Any], None]:
    """Do these for the first requests to `route`; the rest as usual."""
    left = list(failures)

    def script(asked: Any) -> None:
        if left and f"{asked.command} {asked.route}" == route:
            asked.read()
            left.pop(0)(asked)
        else:
            asked.serve_episode()

    return script


async def test_an_episode_from_reset_to_verdict(serve_http: Serve) -> None:
    site = serve_http()
    async with Tbench2HttpEnv(base_url=site.url) as env:
        first = await env.reset(task_id="hello", seed=1)
        assert (first.observation.instruction, first.reward, first.done) == ("do hello", None, False)
        assert (await env.step(Tbench2Action(command="pwd"))).observation.output == "pwd"
        assert (await env.exec("ls")).output == "ls"
        assert (await env.write_file("a.txt", "text")).output == "text"
        verdict = await env.evaluate()
        assert site.live
    assert (verdict.reward, verdict.done, verdict.observation.reward) == (1.0, True, 1.0)
    assert verdict.observation.info["harness"] == "tests/test.sh"
    assert not site.live


async def test_what_goes_over_the_wire(serve_http: Serve) -> None:
    site = serve_http()
    async with Tbench2HttpEnv(base_url=site.url, headers={"X-Rollout": "7"}) as env:
        await env.reset(task_id="hello", episode_id="a b/c")
        await env.exec("make", session_id="build", block=False)
        await env.state()
    action = Tbench2Action(command="make", session_id="build", block=False).model_dump()
    assert site.bodies == [{"task_id": "hello", "episode_id": "a b/c"}, {"action": action, "episode_id": "a b/c"}]
    assert site.heard == ["GET /health", "POST /reset", "POST /step", "GET /state", "DELETE /episodes/a%20b%2Fc"]
    assert {headers["x-rollout"] for headers in site.headers} == {"7"}
    assert site.headers[2]["content-type"] == "application/json"


async def test_a_command_may_have_a_limit_of_its_own(serve_http: Serve) -> None:
    site = serve_http()
    async with Tbench2HttpEnv(base_url=site.url) as env:
        await env.reset()
        await env.exec("make", timeout_s=600)
        await env.exec("make")
    assert [body.get("timeout_s") for body in site.bodies[1:]] == [600, None]
    assert "timeout_s" not in site.bodies[2]


def test_so_may_a_blocking_one(serve_http: Serve) -> None:
    site = serve_http()
    with Tbench2HttpEnv(base_url=site.url).sync() as env:
        env.reset()
        env.exec("make", timeout_s=600)
    assert site.bodies[1]["timeout_s"] == 600


async def test_the_server_may_name_the_episode_itself(serve_http: Serve) -> None:
    def script(asked: Any) -> None:
        if asked.route == "/reset":
            asked.data()
            asked.observe(metadata={"episode_id": "e7"})
        else:
            asked.serve_episode()

    async with Tbench2HttpEnv(base_url=serve_http(script).url) as env:
        await env.reset()
        assert (await env.state()).episode_id == "e7"


async def test_before_reset_there_is_no_episode(serve_http: Serve) -> None:
    site = serve_http()
    async with Tbench2HttpEnv(base_url=site.url) as env:
        assert (await env.state()).episode_id is None
        for call in (env.exec("pwd"), env.upload("a", b""), env.download("a")):
            with pytest.raises(UnknownEpisode, match="reset first"):
                await call
    assert site.heard == ["GET /health"]


async def test_reset_replaces_the_episode_and_close_is_for_good(serve_http: Serve) -> None:
    site = serve_http()
    env = Tbench2HttpEnv(base_url=site.url)
    await env.reset()
    await env.reset()
    assert len(site.live) == 1
    await env.close()
    await env.close()
    assert not site.live
    with pytest.raises(UnknownEpisode):
        await env.exec("pwd")
    await env.reset()
    await env.close()
    assert site.heard.count("POST /reset") == 3
    assert not site.live


async def test_an_episode_that_is_gone_already_is_no_trouble(serve_http: Serve) -> None:
    site = serve_http()
    async with Tbench2HttpEnv(base_url=site.url) as env:
        for _ in range(2):
            await env.reset()
            site.live.clear()
            with pytest.raises(EpisodeEnded, match=r"^Server error: no \(code: EPISODE_ENDED\)$"):
                await env.exec("pwd")


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (404, "UNKNOWN_TASK", UnknownTask),
        (422, "VALIDATION_ERROR", BadRequest),
        (429, "CAPACITY_REACHED", CapacityReached),
    ],
)
async def test_a_refused_reset_leaves_no_episode_to_end(
    serve_http: Serve, status: int, code: str, expected: type[Tbench2Error]
) -> None:
    site = serve_http(lambda asked: asked.fail(status, code))
    env = Tbench2HttpEnv(base_url=site.url)
    with pytest.raises(expected):
        await env.reset(task_id="hello", episode_id="somebody-elses")
    await env.close()
    assert site.heard == ["POST /reset"]


async def test_a_full_server_is_asked_until_a_slot_is_free(serve_http: Serve) -> None:
    def full(asked: Any) -> None:
        asked.fail(429, "CAPACITY_REACHED", Retry_After="0")

    site = serve_http(fail_first("POST /reset", full, full))
    async with Tbench2HttpEnv(base_url=site.url, retry_capacity_s=LONG_S) as env:
        await env.reset()
    assert site.heard == ["GET /health", *["POST /reset"] * 3, f"DELETE /episodes/{site.bodies[0]['episode_id']}"]


async def test_a_reset_whose_reply_was_lost_is_ended_before_it_is_tried_again(serve_http: Serve) -> None:
    def begin_and_hang_up(asked: Any) -> None:
        asked.server.live.append("mine")

    site = serve_http(fail_first("POST /reset", begin_and_hang_up))
    async with Tbench2HttpEnv(base_url=site.url, retry_capacity_s=LONG_S) as env:
        await env.reset(episode_id="mine")
        assert site.live == ["mine"]
    assert site.heard[1:4] == ["POST /reset", "DELETE /episodes/mine", "POST /reset"]


async def test_no_server() -> None:
    env = Tbench2HttpEnv(base_url="http://127.0.0.1:1")
    for call in (env.connect(), env.connect(0.1), env.reset()):
        with pytest.raises(ServerGone, match=r"^Failed to connect to http://127\.0\.0\.1:1: "):
            await call
    await env.close()


async def test_connect_waits_for_a_server_that_is_starting(serve_http: Serve) -> None:
    site = serve_http(fail_first("GET /health", lambda asked: asked.answer(503), lambda asked: None))
    assert await (env := Tbench2HttpEnv(base_url=site.url)).connect(retry_capacity_s=LONG_S) is env
    assert site.heard == ["GET /health"] * 3


async def test_cancelling_a_call_hangs_up_at_once_and_the_episode_lives_on(serve_http: Serve) -> None:
    site = serve_http(fail_first("POST /step", lambda asked: asked.wait_until_lost()))
    async with Tbench2HttpEnv(base_url=site.url) as env:
        await env.reset()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(env.exec("sleep 100"), 0.2)
        assert await noticed_by(site)
        assert (await env.exec("pwd")).output == "pwd"


async def test_an_action_that_is_still_being_ended_is_waited_for(serve_http: Serve) -> None:
    def busy(asked: Any) -> None:
        asked.fail(409, "EPISODE_BUSY")

    site = serve_http(fail_first("POST /step", lambda asked: asked.wait_until_lost(), busy, busy))
    async with Tbench2HttpEnv(base_url=site.url) as env:
        await env.reset()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(env.exec("sleep 100"), 0.2)
        assert (await env.exec("pwd")).output == "pwd"
    assert site.heard.count("POST /step") == 4


async def test_an_episode_busy_with_somebody_elses_action_is_an_error(serve_http: Serve) -> None:
    site = serve_http(fail_first("POST /step", lambda asked: asked.fail(409, "EPISODE_BUSY")))
    async with Tbench2HttpEnv(base_url=site.url) as env:
        await env.reset()
        with pytest.raises(EpisodeBusy):
            await env.exec("pwd")
    assert site.heard.count("POST /step") == 1


async def test_a_cancelled_reset_is_ended_by_close(serve_http: Serve) -> None:
    site = serve_http(hang_on("POST /reset"))

    async def episode() -> None:
        async with Tbench2HttpEnv(base_url=site.url) as env:
            await env.reset()

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(episode(), 0.3)
    assert await noticed_by(site)
    assert site.heard[-1] == f"DELETE /episodes/{site.bodies[0]['episode_id']}"


async def test_no_reply_in_time_ends_the_call_only(serve_http: Serve) -> None:
    site = serve_http(fail_first("POST /step", lambda asked: asked.wait_until_lost()))
    async with Tbench2HttpEnv(base_url=site.url, message_timeout_s=0.3) as env:
        await env.reset()
        with pytest.raises(ReplyTimeout, match=r"within 0\.3 s") as caught:
            await env.exec("sleep 100")
        assert caught.value.code == "REPLY_TIMEOUT"
        assert await noticed_by(site)
        assert (await env.exec("pwd")).output == "pwd"


async def test_a_connection_lost_in_mid_call_loses_the_call_only(serve_http: Serve) -> None:
    site = serve_http(fail_first("POST /step", lambda asked: None))
    async with Tbench2HttpEnv(base_url=site.url) as env:
        await env.reset()
        with pytest.raises(ConnectionClosed) as caught:
            await env.exec("pwd")
        assert caught.value.code == "CONNECTION_LOST"
        assert (await env.exec("pwd")).output == "pwd"


async def test_closing_ends_the_calls_under_way_and_the_episode(serve_http: Serve) -> None:
    site = serve_http(hang_on("POST /step"))
    env = Tbench2HttpEnv(base_url=site.url)
    await env.reset()
    calls = [asyncio.create_task(env.exec("sleep 100")) for _ in range(2)]
    await soon(lambda: "POST /step" in site.heard, 5)
    began = time.monotonic()
    await env.close()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [ConnectionClosed] * 2
    assert time.monotonic() - began < AT_ONCE_S
    assert await noticed_by(site)
    assert not site.live
    assert site.heard.count("POST /step") == 1


async def test_closing_ends_the_trying(serve_http: Serve) -> None:
    site = serve_http(lambda asked: asked.fail(429, "CAPACITY_REACHED", Retry_After="20"))
    env = Tbench2HttpEnv(base_url=site.url, retry_capacity_s=LONG_S)
    trying = asyncio.create_task(env.reset())
    await soon(lambda: site.heard == ["POST /reset"], 5)
    await asyncio.sleep(0.1)
    began = time.monotonic()
    await env.close()
    with pytest.raises(ConnectionClosed, match="closed"):
        await trying
    assert time.monotonic() - began < AT_ONCE_S
    assert site.heard == ["POST /reset"]


async def test_closing_does_not_wait_for_a_server_that_hangs(
    serve_http: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tbench2_env.http._GOODBYE_TIMEOUT_S", 0.2)

    def script(asked: Any) -> None:
        asked.wait_until_lost() if asked.command == "DELETE" else asked.serve_episode()

    site = serve_http(script)
    env = Tbench2HttpEnv(base_url=site.url)
    await env.reset()
    began = time.monotonic()
    await env.close()
    assert time.monotonic() - began < AT_ONCE_S
    assert await noticed_by(site)


async def test_calls_take_turns(serve_http: Serve) -> None:
    under_way = threading.Semaphore(1)

    def one_at_a_time(asked: Any) -> None:
        assert under_way.acquire(blocking=False)
        time.sleep(0.02)
        under_way.release()  # Before the answer: the next call may come as soon as that is out.
        asked.serve_episode()

    async with Tbench2HttpEnv(base_url=serve_http(one_at_a_time).url) as env:
        await env.reset()
        replies = await asyncio.gather(*(env.exec(f"echo {n}") for n in range(5)))
    assert [reply.output for reply in replies] == [f"echo {n}" for n in range(5)]


async def test_many_clients_do_not_wait_for_each_other(serve_http: Serve) -> None:
    together = threading.Barrier(64)

    def script(asked: Any) -> None:
        if asked.route == "/step":
            together.wait(timeout=20)
        asked.serve_episode()

    site = serve_http(script)

    async def episode() -> None:
        async with Tbench2HttpEnv(base_url=site.url) as env:
            await env.reset()
            await env.exec("pwd")

    await asyncio.gather(*(episode() for _ in range(64)))
    assert not site.live


async def test_files_go_there_and_back(serve_http: Serve, tmp_path: Path) -> None:
    site = serve_http()
    content = bytes(range(256)) * 4000
    (tmp_path / "here").write_bytes(content)
    async with Tbench2HttpEnv(base_url=site.url) as env:
        await env.reset()
        await env.upload("whole", content)
        await env.upload("empty", b"")
        await env.upload("/path/with blank & ü", tmp_path / "here")
        with (tmp_path / "here").open("rb") as file:
            file.seek(256)
            await env.upload("open", file)
        assert site.files == {
            "whole": content,
            "empty": b"",
            "/path/with blank & ü": content,
            "open": content[256:],
        }
        assert [await env.download(path) for path in site.files] == list(site.files.values())
        with (tmp_path / "back").open("wb") as file:
            await env.download_to("whole", file)
    assert (tmp_path / "back").read_bytes() == content
    puts = [headers for heard, headers in zip(site.heard, site.headers, strict=True) if heard.startswith("PUT")]
    assert {headers["content-type"] for headers in puts} == {"application/octet-stream"}


async def test_a_file_that_cannot_be_read_is_the_callers_error(serve_http: Serve, tmp_path: Path) -> None:
    site = serve_http()

    class Torn(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise OSError("disk on fire")

    async with Tbench2HttpEnv(base_url=site.url) as env:
        await env.reset()
        with pytest.raises(FileNotFoundError):
            await env.upload("a", tmp_path / "missing")
        site.script = lambda asked: asked.wait_until_lost()
        with pytest.raises(OSError, match="disk on fire"):
            await env.upload("a", Torn())
        assert await noticed_by(site)
        site.script = lambda asked: asked.serve_episode()
    assert site.files == {}


async def test_a_file_that_cannot_be_written_is_the_callers_error(serve_http: Serve, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"")
    site = serve_http()
    async with Tbench2HttpEnv(base_url=site.url) as env:
        await env.reset()
        await env.upload("a", b"x")
        with (tmp_path / "f").open("rb") as file, pytest.raises(io.UnsupportedOperation):
            await env.download_to("a", file)


@pytest.mark.parametrize("hangs_up", [True, False])
async def test_a_refused_upload_has_the_servers_reason(serve_http: Serve, hangs_up: bool) -> None:
    def refuse_unread(asked: Any) -> None:
        if asked.command != "PUT":
            asked.serve_episode()
        else:
            asked.fail(413, "VALIDATION_ERROR", "too large")
            if not hangs_up:
                asked.wait_until_lost()

    async with Tbench2HttpEnv(base_url=serve_http(refuse_unread).url) as env:
        await env.reset()
        with pytest.raises(BadRequest, match="too large"):
            await env.upload("a", b"x" * 10_000_000)


@pytest.mark.parametrize("framing", [{"Content_Length": "900000"}, {"Transfer_Encoding": "chunked"}])
async def test_a_download_that_breaks_off_is_no_file(serve_http: Serve, framing: dict[str, str]) -> None:
    def break_off(asked: Any) -> None:
        if asked.route.endswith("/files"):
            asked.answer(200, b"5\r\nbegun\r\n", **framing)
        else:
            asked.serve_episode()

    async with Tbench2HttpEnv(base_url=serve_http(break_off).url) as env:
        await env.reset()
        with pytest.raises(ConnectionClosed, match=r"missing|IncompleteRead"):
            await env.download("a")


@pytest.mark.parametrize("reply", [b"no json", b"[1]", b"{}", b'{"observation":{"output":[1]}}'])
async def test_a_reply_without_sense(serve_http: Serve, reply: bytes) -> None:
    site = serve_http(fail_first("POST /step", lambda asked: asked.answer(200, reply)))
    async with Tbench2HttpEnv(base_url=site.url) as env:
        await env.reset()
        with pytest.raises(Tbench2Error) as caught:
            await env.exec("true")
        assert caught.value.code == "BAD_REPLY"
        assert (await env.exec("pwd")).output == "pwd"


async def test_a_server_that_does_not_speak_http(serve_http: Serve) -> None:
    site = serve_http(lambda asked: asked.wfile.write(b"SSH-2.0\r\n\r\n"))
    with pytest.raises(ConnectionClosed):
        await Tbench2HttpEnv(base_url=site.url).connect()


async def test_a_request_that_is_no_json_is_the_callers_error_and_not_sent(serve_http: Serve) -> None:
    site = serve_http()
    async with Tbench2HttpEnv(base_url=site.url) as env:
        await env.reset()
        with pytest.raises(TypeError):
            await env.reset(seed=object())
        assert (await env.exec("pwd")).output == "pwd"


def test_the_blocking_client(serve_http: Serve, tmp_path: Path) -> None:
    site = serve_http()
    with Tbench2HttpEnv(base_url=site.url).sync() as env:
        assert env.reset(task_id="hello").observation.instruction == "do hello"
        assert env.exec("ls").output == "ls"
        assert env.evaluate().reward == 1.0
        env.upload("a", b"content")
        assert env.download("a") == b"content"
        with (tmp_path / "back").open("wb") as file:
            env.download_to("a", file)
        assert env.state().episode_id == site.live[0]
    assert (tmp_path / "back").read_bytes() == b"content"
    assert not site.live
    assert_no_threads()


def test_the_blocking_client_takes_turns_in_one_life_after_the_other(serve_http: Serve) -> None:
    site = serve_http()
    env = Tbench2HttpEnv(base_url=site.url).sync()
    for _ in range(2):
        env.reset()
        threads = [threading.Thread(target=env.exec, args=("pwd",)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        env.close()
    assert site.heard.count("POST /step") == 16


def test_a_plain_with_tells_of_sync() -> None:
    with (
        pytest.raises(TypeError, match=r"Tbench2HttpEnv is async.*\.sync\(\)"),
        Tbench2HttpEnv("http://localhost:8003"),
    ):
        pass


async def test_the_same_program_runs_on_both(serve: Serve, serve_http: Serve) -> None:
    async def program(env: Tbench2Env | Tbench2HttpEnv) -> list[object]:
        async with env:
            first = await env.reset(task_id="hello")
            return [first.observation.instruction, (await env.exec("pwd")).output, (await env.evaluate()).reward]

    outcomes = [await program(Tbench2Env(serve().url)), await program(Tbench2HttpEnv(serve_http().url))]
    assert outcomes[0] == outcomes[1] == ["do hello", "pwd", 1.0]
