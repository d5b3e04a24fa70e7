"""Starting programs: where the child is born, what it gets, what is heard of it, and that nobody waits for it."""

import os
import resource
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from tbench2_env.isolation import start
from tbench2_env.isolation.program import NOT_STARTED, SPARE_FDS, Program
from tbench2_env.isolation.start import Started, Starter, move_all_up, move_up

from .child import as_root, in_own_process, stat_fields
from .inside import execute, start_into, start_namespace
from .rig import children, descriptors, inner_number, own_descriptors

DIRECTLY_AND_ASIDE = pytest.mark.parametrize("aside", [False, True], ids=["directly", "aside"])


def ending(status: int) -> Program:
    program = Program()
    program.call("exit_group", status)
    return program


def failing(what: str = "") -> Program:
    program = Program()
    program.call("getpid")
    program.call("chdir", program.text(b"/nowhere"), what=what)
    program.call("exit_group", 1)
    return program


def waiting(say: int) -> Program:
    """Says "x" once it runs, then sleeps for ever."""
    program = Program()
    program.call("write", say, program.data(b"x"), 1)
    program.call("ppoll", 0, 0, 0, 0, 8)
    return program


def end_of(started: Started) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(started.pid, 0)[1])


def failure(starter: Starter, started: Started) -> OSError:
    error = starter.ended(started, end_of(started))
    assert error is not None
    return error


@contextmanager
def held_back() -> Iterator[int]:
    """Children wait before their exec, while they have our memory, for a byte in the pipe that this answers with."""
    read_end, write_end = os.pipe()
    first_steps = start._first_steps

    def slow(address: int, file: int, passed: Sequence[int], aside_into: int) -> Program:
        program = first_steps(address, file, passed, aside_into)
        program.call("read", read_end, program.data(b"\0"), 1)
        program.steps.insert(-1, program.steps.pop())  # before the exec
        return program

    start._first_steps = slow
    yield write_end
    start._first_steps = first_steps
    os.close(read_end)
    os.close(write_end)


# ---------------------------------------------------------------- where it is born
@DIRECTLY_AND_ASIDE
@as_root
def test_a_child_in_another_pid_namespace(aside: bool) -> None:
    first, namespace = start_namespace()
    starter = Starter()
    read_end, write_end = os.pipe()
    program = execute(Program(), "/bin/bash", "-c", f"echo $$ $PPID >&{write_end}; exit 5")
    started = start_into(starter, program, [write_end], namespace, aside)
    number, parent = os.read(read_end, 100).split()
    assert int(number) in (2, 3)
    assert parent == b"0", "its parent is outside"
    assert end_of(started) == 5, "its parent is not the caller"
    assert children(os.getpid()) == [first], "the intermediate process was left"


@as_root
def test_whoever_starts_aside_can_still_make_namespaces() -> None:
    before = own_descriptors()
    starter = Starter()
    own = own_descriptors().keys() - before.keys()
    for _ in range(3):
        first, namespace = start_namespace()
        read_end, write_end = os.pipe()
        started = starter.start(waiting(write_end), [write_end], aside_into=namespace)
        assert os.read(read_end, 1) == b"x"
        assert inner_number(started.pid) > 1
        child = os.fork()
        if child == 0:
            os._exit(os.stat("/proc/self/ns/pid") != os.stat(f"/proc/{os.getppid()}/ns/pid"))  # noqa: PTH116
        assert os.waitpid(child, 0) == (child, 0), "the caller's children are born elsewhere"
        for doomed in (started.pid, first):
            os.kill(doomed, signal.SIGKILL)
            assert os.waitpid(doomed, 0) == (doomed, signal.SIGKILL)
        for fd in (namespace, read_end, write_end):
            os.close(fd)
        with pytest.raises(ChildProcessError):
            os.wait()  # the intermediate process is reaped, too
    assert own_descriptors().keys() - before.keys() == own, "descriptors are left"


@DIRECTLY_AND_ASIDE
@as_root
def test_a_namespace_that_is_dead_is_an_error(aside: bool) -> None:
    first, namespace = start_namespace()
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    starter = Starter()
    before = own_descriptors()
    with pytest.raises(OSError, match=r"clone.*: Cannot allocate memory"):
        start_into(starter, ending(0), [], namespace, aside)
    assert own_descriptors() == before


@in_own_process
def test_what_is_no_namespace_is_an_error() -> None:
    starter = Starter()
    with pytest.raises(OSError, match="setns: Invalid argument"):
        starter.start(ending(0), [], aside_into=os.open("/", os.O_RDONLY))
    with pytest.raises(ChildProcessError):
        os.wait()


# ---------------------------------------------------------------- nobody waits for it
@DIRECTLY_AND_ASIDE
@as_root
def test_the_caller_need_not_wait_for_a_child_that_is_stopped_in_the_middle(aside: bool) -> None:
    """An agent may be able to stop it before its exec, and end it there."""
    _, namespace = start_namespace()
    starter = Starter()
    with held_back():
        stopped = start_into(starter, ending(3), [], namespace, aside)
    os.kill(stopped.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, stopped.pid, os.WSTOPPED)
    begun = time.monotonic()
    for number in (7, 8):
        assert end_of(start_into(starter, ending(number), [], namespace, aside)) == number
    assert time.monotonic() - begun < 5
    os.kill(stopped.pid, signal.SIGKILL)
    assert end_of(stopped) == -signal.SIGKILL
    assert end_of(start_into(starter, ending(9), [], namespace, aside)) == 9


@in_own_process
def test_many_at_once() -> None:
    starter = Starter()
    before = own_descriptors()
    with held_back() as go:
        started = [starter.start(ending(number), []) for number in range(50)]
        assert len({one.pid for one in started}) == 50
        os.write(go, bytes(50))
        assert [end_of(one) for one in started] == list(range(50))
    failed = [starter.start(failing(str(number)), []) for number in range(20)]
    ended = [(one, end_of(one)) for one in reversed(failed)]
    reasons = [str(starter.ended(*one)) for one in ended]
    assert reasons == [f"[Errno 2] {number}: No such file or directory" for number in reversed(range(20))]
    assert own_descriptors() == before


# ---------------------------------------------------------------- signals
@in_own_process
def test_signals_before_the_exec_are_the_childs_and_wait() -> None:
    """A handler of ours would run in our memory, in a process that is not us."""
    caught: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for number in numbers:
        signal.signal(number, lambda number, frame: caught.append(number))
    starter = Starter()
    with held_back() as go:
        for number in numbers:
            started = starter.start(execute(Program(), "/bin/sleep", "1000"), [])
            os.kill(started.pid, number)
            time.sleep(0.01)
            assert stat_fields(started.pid)[0] in "RSD", "it has no handler of its own yet"
            os.write(go, b"x")
            assert end_of(started) == -number
    assert not caught
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
    os.kill(os.getpid(), signal.SIGTERM)
    assert caught == [signal.SIGTERM], "ours are as they were"


# ---------------------------------------------------------------- descriptors
@in_own_process
def test_only_the_descriptors_that_are_passed_arrive() -> None:
    starter = Starter()
    (read_end, write_end), passed = os.pipe(), os.open("/dev/zero", os.O_RDONLY)
    kept = os.open("/dev/full", os.O_RDONLY)
    before = own_descriptors()
    inherited = {fd for fd in before if os.get_inheritable(fd)}
    started = starter.start(waiting(write_end), [write_end, passed])
    assert own_descriptors() == before
    assert os.read(read_end, 1) == b"x"
    arrived = descriptors(started.pid)
    # The one for reports is the program's to close.
    assert arrived.keys() - inherited == {write_end, passed, starter._report_to}
    assert arrived[passed] == "/dev/zero"
    assert not os.get_inheritable(passed)
    assert kept not in arrived
    os.kill(started.pid, signal.SIGKILL)
    assert end_of(started) == -signal.SIGKILL


@in_own_process
def test_more_descriptors_than_can_be_passed_are_an_error() -> None:
    starter = Starter()
    before = own_descriptors()
    assert end_of(starter.start(ending(3), [starter._listening] * 1000)) == 3
    with pytest.raises(ValueError, match="a program has 2102 steps"):
        starter.start(ending(0), [0] * 2100)
    program = ending(0)
    for _ in range(2100):
        program.call("getpid")
    with pytest.raises(ValueError, match="a program has 2101 steps"):
        starter.start(program, [])
    assert own_descriptors() == before
    assert end_of(starter.start(ending(4), [])) == 4


@in_own_process
def test_no_descriptor_has_a_number_that_programs_use() -> None:
    """With 25 episodes, a namespace of a verifier's had the number of the folder that a mount of his was put on."""
    Starter()
    assert not {os.dup(0) for _ in range(start.FIRST_PRIVATE_FD)} & set(SPARE_FDS)
    assert not any(os.get_inheritable(fd) for fd in SPARE_FDS)


@in_own_process
def test_moving_descriptors_up() -> None:
    fds = [os.open(path, os.O_RDONLY) for path in ("/dev/zero", "/dev/full")]
    before = own_descriptors()
    moved = list(fds)
    move_all_up(moved)
    now = own_descriptors()
    assert [now[fd] for fd in moved] == ["/dev/zero", "/dev/full"]
    assert min(moved) >= start.FIRST_PRIVATE_FD
    assert len(now) == len(before)
    assert not now.keys() & set(fds)
    resource.setrlimit(resource.RLIMIT_NOFILE, (start.FIRST_PRIVATE_FD, start.FIRST_PRIVATE_FD))
    low = os.open("/dev/zero", os.O_RDONLY)
    with pytest.raises(OSError, match=r"Invalid argument|Too many open files"):
        move_up(low)
    assert own_descriptors()[low] == "/dev/zero"


# ---------------------------------------------------------------- what is heard of it
@in_own_process
def test_why_it_came_to_nothing() -> None:
    starter = Starter()
    assert str(failure(starter, starter.start(failing(), []))) == "[Errno 2] chdir: No such file or directory"
    named = failure(starter, starter.start(failing("going away"), []))
    assert (named.errno, named.strerror) == (2, "going away: No such file or directory")
    # In the steps before it is itself.
    assert "fcntl: Bad file descriptor" in str(failure(starter, starter.start(ending(0), [999])))
    missing = starter.start(execute(Program(), "/no/such/program"), [])
    assert "execve: No such file or directory" in str(failure(starter, missing))


@in_own_process
def test_an_end_that_is_no_failure() -> None:
    starter = Starter()
    for number in (0, 1, NOT_STARTED, 255):
        started = starter.start(execute(Program(), "/bin/bash", "-c", f"exit {number}"), [])
        assert starter.ended(started, end_of(started)) is None, number
    failed, ran = starter.start(failing(), []), starter.start(ending(NOT_STARTED), [])
    assert starter.ended(ran, end_of(ran)) is None, "another's report is not its own"
    assert "chdir" in str(failure(starter, failed))
    killed = starter.start(execute(Program(), "/bin/sleep", "1000"), [])
    os.kill(killed.pid, signal.SIGKILL)
    assert starter.ended(killed, end_of(killed)) is None
