"""How the helpers come to be: the first process hardens itself, finds out what this host offers, and forks the others.

Started by `sandbox.Spawner` as `python -I -S -c ...` (lean imports make each fork cheap).
"""

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from tbench2_env.isolation import bare, frame, laid, launcher, mask, probe, warden
from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.channel import Channel, ChannelClosed
from tbench2_env.isolation.provisions import Provisions
from tbench2_env.isolation.spawner import Helpers, Spawner
from tbench2_env.isolation.spec import RUNGS, SpawnerConfig
from tbench2_env.isolation.start import move_up

#: The last argument of a spawner that is in its own user namespace.
_ENTERED = "entered"


def _own_socket(fd: str) -> Channel:
    """The inherited socket, moved out of the low numbers that commands take."""
    return Channel(socket.socket(fileno=move_up(int(fd))))


def _harden() -> None:
    """Nobody below may look into the helpers; orphans of episodes come here; the terminal's signals do not."""
    sc.prctl(sc.PR_SET_CHILD_SUBREAPER, 1)
    sc.prctl(sc.PR_SET_DUMPABLE, 0)
    os.setsid()
    sc.leave_session_keyring()
    # An ignored signal stays ignored across exec, and bash cannot undo that: commands must get none of those that
    # Python ignores or that the server was started with (nohup, a script's `&`). What the helpers ignore, they catch.
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    sc.restore_thread_signals()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, lambda number, frame: None)


def _start_again_in_own_user_namespace(server: int) -> NoReturn:
    """By exec, because the /proc files of an undumpable process belong to the namespace that it was executed in."""
    try:
        probe.enter_own_user_namespace()
        os.execve(sys.executable, [*sys.orig_argv, _ENTERED], {})
    except OSError as error:
        _refuse(Channel(socket.socket(fileno=server)), error)


def _refuse(server: Channel, error: OSError) -> NoReturn:
    with contextlib.suppress(ChannelClosed):
        server.send({"error": error.strerror or str(error)})
    sys.exit(1)


def main(arguments: list[str]) -> None:
    """`arguments`: the config as JSON, and the numbers of the sockets to the server for spawner and launcher."""
    config = SpawnerConfig.from_dict(json.loads(arguments[0]))
    laid.sweep(config.scratch)
    if RUNGS[config.rung].by_folder and arguments[-1] != _ENTERED:
        _start_again_in_own_user_namespace(int(arguments[1]))
    server, launcher_server = _own_socket(arguments[1]), _own_socket(arguments[2])
    _harden()
    if not RUNGS[config.rung].isolated:
        _serve_without_isolation(config, server, launcher_server)
        return
    try:
        ground = probe.choose_ground(config)
    except OSError as error:
        _refuse(server, error)
    to_warden, warden_end = _pair()
    # Looks for what this host offers with children of its own: before any other is born.
    provisions = Provisions(ground, to_warden, config.egress, config.nice)
    if provisions.egress is not None:
        for layer in (mask, frame):
            layer.set_nameservers(ground.rung, provisions.egress.nameservers)
    to_launcher, launcher_end = _pair()
    helpers = (
        _fork([server, launcher_server, to_warden, to_launcher, launcher_end], lambda: warden.main(warden_end)),
        _fork(
            [server, to_warden, warden_end, to_launcher],
            lambda: launcher.main(launcher_server, launcher_end, ground.rung),
        ),
    )
    for channel in (launcher_server, warden_end, launcher_end):
        channel.sock.close()
    Spawner(server, Helpers(to_launcher, to_warden, helpers), ground, provisions).run()


def _serve_without_isolation(config: SpawnerConfig, server: Channel, commands_server: Channel) -> None:
    try:
        helper = bare.prepare(config, server, commands_server)
    except OSError as error:
        _refuse(server, error)
    helper.run()


def _fork(not_its_own: Sequence[Channel], become: Callable[[], NoReturn]) -> int:
    """Fork a helper; a channel is only closed when nobody else has an end of it."""
    pid = os.fork()
    if pid == 0:
        for channel in not_its_own:
            channel.sock.close()
        become()
    return pid


def _pair() -> tuple[Channel, Channel]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return _own_socket(str(ours.detach())), _own_socket(str(theirs.detach()))
