import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tbench2_env import ConnectionClosed, ReplyTimeout, ServerGone, Tbench2Action, Tbench2Env

Serve = Callable[..., Any]


def play(url: str) -> None:
    with Tbench2Env(base_url=url).sync() as env:
        assert env.reset(task_id="hello").observation.instruction == "do hello"
        assert env.step(Tbench2Action(command="pwd")).observation.output == "pwd"
        assert env.exec("ls", session_id="s").output == "ls"
        assert env.write_file("a.txt", "text").output == "text"
        assert env.state().episode_id == "e1"
        assert env.evaluate().reward == 1.0


def client_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tbench2-env-sync"]


def hang(peer: Any) -> None:
    peer.request()
    peer.wait_until_lost()


def test_an_episode(serve: Serve) -> None:
    server = serve()
    play(server.url)
    assert server.wait_ended()
    assert server.requests[-1] == {"type": "close"}
    assert not client_threads()


async def test_an_episode_inside_a_running_loop(serve: Serve) -> None:
    play(serve().url)


def test_without_a_block_and_again_after_close(serve: Serve) -> None:
    server = serve()
    env = Tbench2Env(base_url=server.url).sync()
    env.close()
    for _ in range(2):
        assert env.exec("pwd").output == "pwd"
        env.close()
        env.close()
    assert len(server.headers) == 2


def test_no_server_leaves_no_thread() -> None:
    with pytest.raises(ServerGone), Tbench2Env(base_url="http://127.0.0.1:1").sync():
        pass
    assert not client_threads()


def test_errors_are_the_async_clients(serve: Serve) -> None:
    with Tbench2Env(base_url=serve(hang).url, message_timeout_s=0.1).sync() as env, pytest.raises(ReplyTimeout):
        env.reset()


def test_calls_from_several_threads_take_turns(serve: Serve) -> None:
    outputs: list[str] = []
    with Tbench2Env(base_url=serve().url).sync() as env:
        threads = [threading.Thread(target=lambda: outputs.append(env.exec("pwd").output)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert outputs == ["pwd"] * 8


def test_closing_from_another_thread_ends_a_call(serve: Serve) -> None:
    env = Tbench2Env(base_url=serve(hang).url).sync()
    closer = threading.Timer(0.2, env.close)
    closer.start()
    with pytest.raises(ConnectionClosed):
        env.exec("sleep 100")
    closer.join()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C as in a foreground process: shells start background ones with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_call_is_cancelled(serve: Serve) -> None:
    server = serve(hang)
    with Tbench2Env(base_url=server.url).sync() as env:
        threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            env.exec("sleep 100")
        assert server.wait_ended()
        assert time.monotonic() - began < 5
