"""What a command starts with: descriptors, environment, folder, signals, terminal."""

import asyncio
import contextlib
import fcntl
import os
import signal
import struct
import termios
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tbench2_env.isolation.channel import MESSAGE_MAX
from tbench2_env.isolation.process import Process, SandboxError
from tbench2_env.isolation.sandbox import Sandbox
from tbench2_env.isolation.spec import CommandSpec

from .rig import ENV, Rig, bash, processes, until

#: bash lists its own descriptors while it has the folder open as 3 (or the next free one).
LIST_DESCRIPTORS = "echo /proc/self/fd/*"
SIGNALS = "grep -E 'Sig(Ign|Blk|Pnd)' /proc/self/status"


# ---------------------------------------------------------------- how it ends
async def test_the_exit_status_and_the_signal(rig: Rig) -> None:
    sandbox = await rig.create()
    endings = {"exit 0": 0, "exit 3": 3, "exit 255": 255, "kill -KILL $$": -9, "kill -SEGV $$": -11}
    assert {script: (await rig.sh(sandbox, script)).status for script in endings} == endings


async def test_stdin_stdout_and_stderr(rig: Rig) -> None:
    running = rig.start_sh(await rig.create(), "read line; echo got $line; echo error >&2")
    running.say("hello")
    done = await running.done()
    assert (done.status, done.output) == (0, "got hello\nerror\n")


async def test_a_command_that_cannot_be_started(rig: Rig) -> None:
    sandbox = await rig.create()
    for command, reason in (
        (CommandSpec("/no/such/program", ("x",), "/", {}), "/no/such/program: .*No such file"),
        (CommandSpec("/etc/passwd", ("x",), "/", {}), "/etc/passwd: .*Permission denied"),
        (CommandSpec("/tmp", ("x",), "/", {}), "/tmp: .*Permission denied"),
        (CommandSpec("/bin/true", ("x",), "/", {"A": "nul\0"}), "embedded null byte"),
        (CommandSpec("/bin/true", ("x",), "/", {"A=B": "x"}), "illegal environment variable name"),
        (CommandSpec("/bin/true", ("x" * 200_000,), "/", {}), "Argument list too long"),
    ):
        running = rig.start_command(sandbox, command)
        with pytest.raises(SandboxError, match=reason):
            await running.process.wait()
    assert (await rig.sh(sandbox, "echo fine")).output == "fine\n"


# ---------------------------------------------------------------- environment
async def test_the_environment_is_what_was_given_and_nothing_else(rig: Rig) -> None:
    env = {"A": "1", "EMPTY": "", "MULTI": "two\nlines", "UTF8": "é€", "BYTES": os.fsdecode(b"\xff\xfe")}
    command = CommandSpec("/bin/cat", ("cat", "/proc/self/environ"), "/", env)
    done = await rig.start_command(await rig.create(), command).done()
    assert done.output == "".join(f"{name}={value}\0" for name, value in env.items())


async def test_no_environment_at_all(rig: Rig) -> None:
    done = await rig.start_command(await rig.create(), CommandSpec("/usr/bin/env", ("env",), "/", {})).done()
    assert (done.status, done.output) == (0, "")


async def test_an_environment_close_to_the_limit(rig: Rig) -> None:
    sandbox = await rig.create()
    pieces = {f"V{number}": "x" * 60_000 for number in range(4)}
    pieces["LAST"] = "x" * (MESSAGE_MAX - 4 * 60_000 - 500)
    done = await rig.sh(sandbox, "echo ${#V0} ${#V3} ${#LAST}", env=ENV | pieces)
    assert done.lines == [f"60000 60000 {len(pieces['LAST'])}"]


async def test_an_environment_over_the_limit_is_refused_with_advice(rig: Rig) -> None:
    sandbox = await rig.create()
    too_much = ENV | {f"V{number}": "x" * 60_000 for number in range(5)}
    advice = rf"bytes to the spawner, {MESSAGE_MAX} at most: shorten env or argv"
    with pytest.raises(SandboxError, match=advice):
        rig.start_sh(sandbox, "true", env=too_much)
    with pytest.raises(SandboxError, match=advice):
        rig.start_verifier(sandbox, rig.layer(), env=too_much)
    assert (await rig.sh(sandbox, "echo fine")).output == "fine\n"


async def test_one_variable_that_the_kernel_does_not_take(rig: Rig) -> None:
    """MAX_ARG_STRLEN of execve(2) is 128 KiB."""
    sandbox = await rig.create()
    running = rig.start_sh(sandbox, "true", env={"A": "x" * (128 << 10)})
    with pytest.raises(SandboxError, match="Argument list too long"):
        await running.process.wait()


# ---------------------------------------------------------------- descriptors
async def test_no_descriptor_of_the_host_gets_in(rig: Rig) -> None:
    """Not even in a verifier beside other sandboxes, whose /proc the spawner has open."""
    sandbox, layer = await rig.create(), rig.layer(test=LIST_DESCRIPTORS)
    await rig.create()
    assert (await rig.sh(sandbox, LIST_DESCRIPTORS)).output.split() == [f"/proc/self/fd/{n}" for n in range(4)]
    listed = (await rig.verify(sandbox, layer)).output.split()
    assert listed == [f"/proc/self/fd/{n}" for n in (0, 1, 2, 255, 3)], "bash reads its script from 255"


async def test_more_descriptors_become_3_and_4(rig: Rig) -> None:
    sandbox = await rig.create()
    pipes = [os.pipe() for _ in range(2)]
    running = rig.start_sh(sandbox, "echo three >&3; echo four >&4; " + LIST_DESCRIPTORS, [end for _, end in pipes])
    done = await running.done()
    assert done.lines[-1].split() == [f"/proc/self/fd/{number}" for number in range(6)]
    assert [os.read(end, 100) for end, _ in pipes] == [b"three\n", b"four\n"]
    for pipe in pipes:
        for fd in pipe:
            os.close(fd)


async def test_the_server_keeps_its_descriptors_and_the_helpers_none(rig: Rig) -> None:
    """The reader of a pipe sees its end when the command has ended, so nobody else holds the other end."""
    sandbox = await rig.create()
    read_end, write_end = os.pipe()
    null = os.open("/dev/null", os.O_RDWR)
    process = sandbox.start(bash("exit 0"), (null, write_end, null))
    os.close(null)
    os.close(write_end)
    os.set_blocking(read_end, False)
    assert await process.wait() == 0
    assert os.read(read_end, 1) == b""
    os.close(read_end)


# ---------------------------------------------------------------- the process itself
async def test_no_signal_is_ignored_or_blocked(rig: Rig) -> None:
    """An ignored signal stays ignored across exec: `timeout`, `kill %1` and Ctrl-C would do nothing."""
    sandbox = await rig.create()
    nothing = [f"Sig{kind}:\t{0:016x}" for kind in ("Pnd", "Blk", "Ign")]
    assert (await rig.sh(sandbox, SIGNALS)).lines == nothing
    assert (await rig.verify(sandbox, rig.layer(test=SIGNALS))).lines == nothing


async def test_a_command_can_be_signalled_by_another(rig: Rig) -> None:
    sandbox = await rig.create()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        running = rig.start_sh(sandbox, "echo $$; exec sleep 1000")
        pid = (await running.said("\n")).strip()
        await rig.sh(sandbox, f"until [ $(cat /proc/{pid}/comm) = sleep ]; do :; done; kill -{number:d} {pid}")
        assert (await running.done(5)).status == -number, number


async def test_timeout_ends_a_command(rig: Rig) -> None:
    """timeout(1) sends SIGTERM; with SIGTERM ignored it waits for ever."""
    done = await rig.sh(await rig.create(), "timeout 0.1 sleep 5; echo $?", within_s=10)
    assert done.output == "124\n"
    done = await rig.sh(await rig.create(), "sleep 1000 & kill $!; wait $!; echo $?", within_s=10)
    assert done.output == "143\n"


async def test_it_leads_its_own_session_without_terminal(rig: Rig) -> None:
    """Without a session of its own, `kill 0` killed the helper that started it."""
    sandbox = await rig.create()
    script = (
        "read -r pid _ _ _ group session tty _ </proc/$$/stat; echo $(( pid == group && pid == session )) $tty; umask"
    )
    assert (await rig.sh(sandbox, script)).lines == ["1 0", "0022"]
    assert (await rig.sh(sandbox, "echo >/dev/tty")).output.endswith("No such device or address\n")
    assert (await rig.sh(sandbox, "kill -KILL 0")).status == -9
    assert (await rig.sh(sandbox, "echo fine")).output == "fine\n"


async def test_it_is_what_the_oom_killer_takes_first(rig: Rig) -> None:
    assert (await rig.sh(await rig.create(), "cat /proc/self/oom_score_adj")).output == "1000\n"


# ---------------------------------------------------------------- working directory
async def test_the_working_directory_is_made_again(rig: Rig) -> None:
    for before, cwd, expected in (
        ("true", "/usr/lib", "/usr/lib"),
        ("true", "/app/new/deep", "/app/new/deep"),
        ("mkdir -p /app; rm -rf /app", "/app", "/app"),
        ("mkdir /srv/real; ln -s real /srv/link", "/srv/link", "/srv/real"),
        ("echo file >/srv/file", "/srv/file", "/"),
        ("ln -s loop /srv/loop", "/srv/loop/x", "/"),
        ("true", "/proc/1/nothing", "/"),
    ):
        sandbox = await rig.create()
        await rig.sh(sandbox, before)
        assert (await rig.sh(sandbox, "pwd -P", cwd=cwd)).output == expected + "\n", (before, cwd)


# ---------------------------------------------------------------- terminals
class Terminal:
    """The master of a command's terminal."""

    def __init__(self, process: Process, master: int) -> None:
        self.process, self.master = process, master
        self.output = ""
        os.set_blocking(master, False)

    def write(self, text: str) -> None:
        os.write(self.master, text.encode())

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def _read(self) -> str:
        with contextlib.suppress(OSError):  # nothing yet, or nobody has the other side (EIO)
            self.output += os.read(self.master, 65536).decode(errors="replace")
        return self.output

    async def shows(self, text: str) -> str:
        """Wait for `text`; answers with the output so far and forgets it."""
        await until(lambda: text in self._read(), 10, lambda: f"{text!r} in {self.output!r}")
        shown, self.output = self.output, ""
        return shown


@pytest.fixture
async def sandbox(rig: Rig) -> Sandbox:
    return await rig.create()


@pytest.fixture
async def terminal(rig: Rig, sandbox: Sandbox) -> AsyncIterator[Terminal]:
    """An interactive bash without prompt or echo."""
    env = ENV | {"PS1": "", "TERM": "dumb"}
    command = CommandSpec("/bin/bash", ("bash", "--norc", "--noediting", "-i"), "/", env, tty=True)
    opened = Terminal(*await sandbox.open_terminal(command))
    opened.write("stty -echo; bind 'set enable-bracketed-paste off' 2>/dev/null; echo start''ed\n")
    await opened.shows("started\r\n")
    yield opened
    opened.process.kill()
    await opened.process.wait()
    os.close(opened.master)


async def test_a_terminal_is_the_controlling_one(terminal: Terminal) -> None:
    terminal.write("tty; echo direct >/dev/tty; [ -t 0 ] && [ -t 1 ] && [ -t 2 ] && echo all; ls /dev/pts; echo end\n")
    assert (await terminal.shows("end\r\n")).split() == ["/dev/pts/0", "direct", "all", "0", "ptmx", "end"]
    terminal.write("ps -o tty= -p $$; echo end\n")
    assert (await terminal.shows("end\r\n")).split() == ["pts/0", "end"]


async def test_a_terminal_is_the_controlling_one_of_programs_that_do_not_see_to_it_themselves(sandbox: Sandbox) -> None:
    """An interactive bash would."""
    command = CommandSpec("/bin/sh", ("sh", "-c", "echo direct >/dev/tty; read line"), "/", ENV, tty=True)
    opened = Terminal(*await sandbox.open_terminal(command))
    await opened.shows("direct\r\n")
    opened.write("\x03")  # Ctrl-C
    assert await asyncio.wait_for(opened.process.wait(), 5) == -signal.SIGINT
    os.close(opened.master)


async def test_the_size_of_a_terminal(terminal: Terminal) -> None:
    terminal.resize(33, 144)
    terminal.write("stty size\n")
    await terminal.shows("33 144\r\n")


async def test_job_control(terminal: Terminal) -> None:
    terminal.write("sleep 1000 & jobs\n")
    await terminal.shows("Running")
    terminal.write("kill %1; wait %1; echo status $?\n")
    await terminal.shows("status 143")
    terminal.write("sleep 1000; echo went on\n")
    await until_foreground(terminal, "sleep")
    terminal.write("\x1a")  # Ctrl-Z
    await terminal.shows("Stopped")
    terminal.write("jobs; fg\n")
    await terminal.shows("Stopped")
    await until_foreground(terminal, "sleep")
    terminal.write("\x03")  # Ctrl-C
    terminal.write("echo status $?\n")
    await terminal.shows("status 130")


async def until_foreground(terminal: Terminal, name: str) -> None:
    """Wait until a program of this name has the terminal."""

    def running() -> bool:
        group = struct.unpack("i", fcntl.ioctl(terminal.master, termios.TIOCGPGRP, b"\0" * 4))[0]
        return group != 0 and name in comms_of_group(group)

    await until(running, 10, lambda: name)


def comms_of_group(group: int) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == group:
                    found.append((entry / "comm").read_text().strip())
            except OSError:
                continue
    return found


async def test_ctrl_c_interrupts_a_program(terminal: Terminal) -> None:
    terminal.write("sleep 1000\n")
    await until_foreground(terminal, "sleep")
    terminal.write("\x03")
    terminal.write("echo status $?\n")
    await terminal.shows("status 130")


async def test_hanging_up_ends_the_programs_of_a_terminal(sandbox: Sandbox) -> None:
    process, master = await sandbox.open_terminal(bash("echo here; sleep 1000; echo on", tty=True))
    opened = Terminal(process, master)
    await opened.shows("here")
    os.close(master)
    assert await asyncio.wait_for(process.wait(), 5) == -1


async def test_more_descriptors_beside_a_terminal(rig: Rig, sandbox: Sandbox) -> None:
    read_end, write_end = os.pipe()
    process, master = await sandbox.open_terminal(bash(f"echo three >&3; {LIST_DESCRIPTORS}", tty=True), [write_end])
    opened = Terminal(process, master)
    await opened.shows("/proc/self/fd/0 /proc/self/fd/1 /proc/self/fd/2 /proc/self/fd/3 /proc/self/fd/4\r\n")
    assert os.read(read_end, 100) == b"three\n"
    assert await process.wait() == 0
    for fd in (read_end, write_end, master):
        os.close(fd)


async def test_terminals_have_numbers_of_their_own_in_each_sandbox(rig: Rig) -> None:
    opened = []
    for sandbox in (await rig.create(), await rig.create()):
        for _ in range(2):
            opened.append(Terminal(*await sandbox.open_terminal(bash("tty; read", tty=True))))
    names = [(await terminal.shows("\r\n")).strip() for terminal in opened]
    assert names == ["/dev/pts/0", "/dev/pts/1", "/dev/pts/0", "/dev/pts/1"]
    for terminal in opened:
        terminal.process.kill()
        assert await terminal.process.wait() == -9
        os.close(terminal.master)


async def test_a_terminal_whose_program_is_missing(sandbox: Sandbox) -> None:
    process, master = await sandbox.open_terminal(CommandSpec("/no/such/program", ("x",), "/", {}, tty=True))
    with pytest.raises(SandboxError, match="No such file"):
        await process.wait()
    os.close(master)


@pytest.mark.parametrize("instead", ["mkfifo /dev/ptmx", "ln -s /dev/null /dev/ptmx", "true"])
async def test_no_terminal_where_an_agent_took_the_device_away(rig: Rig, sandbox: Sandbox, instead: str) -> None:
    await rig.sh(sandbox, f"rm /dev/ptmx; {instead}")
    with pytest.raises(SandboxError, match=r"/bin/bash: "):
        await asyncio.wait_for(sandbox.open_terminal(bash("true", tty=True)), 5)


async def test_a_terminal_is_not_inherited_by_what_the_server_starts(sandbox: Sandbox) -> None:
    process, master = await sandbox.open_terminal(bash("read", tty=True))
    inheritable = os.get_inheritable(master)
    os.close(master)
    process.kill()
    await process.wait()
    assert not inheritable


async def test_giving_up_on_a_terminal_ends_its_program(rig: Rig, sandbox: Sandbox) -> None:
    for turns in range(6):
        opening = asyncio.ensure_future(sandbox.open_terminal(bash("exec sleep 1000", tty=True)))
        for _ in range(turns):
            await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
    pid_namespace = await rig.pid_namespace(sandbox)
    await until(lambda: list(processes([pid_namespace]).values()) == ["init"], 5, lambda: processes([pid_namespace]))
