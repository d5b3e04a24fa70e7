"""The helpers' event loop."""

import os
import signal
import time

import pytest

from tbench2_env.isolation.reactor import Reactor

from .child import in_own_process


def exits_with(code: int) -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(code)
    return pid


@in_own_process
def test_a_readable_descriptor_is_handled() -> None:
    read_end, write_end = os.pipe()
    seen: list[bytes] = []
    reactor = Reactor(on_child=lambda pid, status: None)
    reactor.watch(read_end, lambda: seen.append(os.read(read_end, 9)))
    reactor.turn(0)
    assert seen == []
    os.write(write_end, b"one")
    reactor.turn(None)
    os.write(write_end, b"two")
    reactor.turn(None)
    assert seen == [b"one", b"two"]


@in_own_process
def test_the_end_of_a_file_is_handled_too() -> None:
    read_end, write_end = os.pipe()
    seen: list[bytes] = []
    reactor = Reactor(on_child=lambda pid, status: None)
    reactor.watch(read_end, lambda: seen.append(os.read(read_end, 9)))
    os.close(write_end)
    reactor.turn(None)
    assert seen == [b""]


@in_own_process
def test_a_forgotten_descriptor_is_not() -> None:
    read_end, write_end = os.pipe()
    reactor = Reactor(on_child=lambda pid, status: None)
    reactor.watch(read_end, lambda: pytest.fail("handled"))
    reactor.forget(read_end)
    os.write(write_end, b"x")
    reactor.turn(0)


@in_own_process
def test_a_handler_may_forget_a_descriptor_that_is_ready_too() -> None:
    pipes = [os.pipe() for _ in range(2)]
    handled: list[int] = []
    reactor = Reactor(on_child=lambda pid, status: None)

    def handle(mine: int, other: int) -> None:
        handled.append(mine)
        reactor.forget(other)

    reactor.watch(pipes[0][0], lambda: handle(pipes[0][0], pipes[1][0]))
    reactor.watch(pipes[1][0], lambda: handle(pipes[1][0], pipes[0][0]))
    for _, write_end in pipes:
        os.write(write_end, b"x")
    reactor.turn(None)
    assert len(handled) == 1


@in_own_process
def test_every_child_is_reported_once() -> None:
    """Signals that arrive together are one signal."""
    ended: dict[int, int] = {}
    reactor = Reactor(on_child=lambda pid, end: ended.update({pid: end.status}))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    expected = {exits_with(code): code for code in range(20)}
    for pid in expected:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    reactor.turn(1000)
    assert ended == expected


@in_own_process
def test_a_child_that_still_runs_is_not_waited_for() -> None:
    ended: list[int] = []
    reactor = Reactor(on_child=lambda pid, end: ended.append(pid))
    read_end, _ = os.pipe()
    running = os.fork()
    if running == 0:
        os.read(read_end, 1)
    first = exits_with(0)
    reactor.turn(5000)
    assert ended == [first]
    os.kill(running, signal.SIGKILL)
    reactor.turn(5000)
    assert ended == [first, running]


@in_own_process
def test_it_runs_until_it_is_stopped() -> None:
    read_end, write_end = os.pipe()
    reactor = Reactor(on_child=lambda pid, status: reactor.stop())
    turns: list[bytes] = []
    reactor.watch(read_end, lambda: turns.append(os.read(read_end, 1)))
    os.write(write_end, b"abc")
    os.close(write_end)
    pid = os.fork()
    if pid == 0:
        time.sleep(0.05)
        os._exit(0)
    reactor.run()
    assert turns[:3] == [b"a", b"b", b"c"]


@in_own_process
def test_an_error_of_a_handler_ends_the_loop() -> None:
    """That is how the helpers learn that the server is gone."""

    def fail() -> None:
        raise ZeroDivisionError

    read_end, write_end = os.pipe()
    reactor = Reactor(on_child=lambda pid, status: None)
    reactor.watch(read_end, fail)
    os.close(write_end)
    with pytest.raises(ZeroDivisionError):
        reactor.run()
