"""What an agent tries on a verifier that runs beside it. Nothing may change the verdict or tell what is in /tests.

An attack is first rehearsed on a process that the agent may attack, so that it is known to work there.
"""

import ctypes
import os
import secrets
import socket

import pytest

from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.process import SandboxError
from tbench2_env.isolation.spec import Limits, Network

from .conftest import StartRig
from .rig import AS_ANOTHER_USER, BEST_RUNG, ENV, Rig
from .scene import NOT_ALLOWED, Scene, is_refused, python, python_attack

# ---------------------------------------------------------------- looking into it
LOOKING = {
    "root": "cat /proc/$T/root$D/secret",
    "cwd": "cat /proc/$T/cwd/secret",
    "fd": "cat /proc/$T/fd/7",
    "fds": "ls -l /proc/$T/fd/",
    "fdinfo": "cat /proc/$T/fdinfo/7",
    "environ": "cat /proc/$T/environ",
    "maps": "cat /proc/$T/maps",
    "mem": "exec 3</proc/$T/mem",
    "auxv": "cat /proc/$T/auxv",
    "exe": "ls -l /proc/$T/exe",
    "namespaces": "ls -l /proc/$T/ns/mnt",
    "child's root": "cat /proc/$C/root$D/secret",
    "thread's root": "cat /proc/$T/task/$T/root$D/secret",
    "nsenter": "nsenter -t $T --mount cat $D/secret",
    "nsenter user": "nsenter -t $T --user --preserve-credentials --mount cat $D/secret",
    "setns of a pidfd": python_attack(
        "check(libc.setns(os.pidfd_open(target), 0x20000))\nopen(os.environ['D'] + '/secret')"
    ),
    "ptrace attach": python_attack("check(libc.ptrace(16, target, 0, 0))"),
    "ptrace seize": python_attack("check(libc.ptrace(0x4206, target, 0, 0))"),
    "process_vm_readv": python_attack("""
        class Vector(ctypes.Structure):
            _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
        buffer = ctypes.create_string_buffer(8)
        ours, theirs = Vector(ctypes.addressof(buffer), 8), Vector(4096, 8)
        libc.process_vm_readv(target, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
        if ctypes.get_errno() != 14:  # EFAULT: we may, but nothing is there
            sys.exit(os.strerror(ctypes.get_errno()))
    """),
    "process_vm_writev": python_attack("""
        class Vector(ctypes.Structure):
            _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
        buffer = ctypes.create_string_buffer(8)
        ours, theirs = Vector(ctypes.addressof(buffer), 8), Vector(4096, 8)
        libc.process_vm_writev(target, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
        if ctypes.get_errno() != 14:
            sys.exit(os.strerror(ctypes.get_errno()))
    """),
    "pidfd_getfd": python_attack("print(os.read(check(libc.syscall(438, os.pidfd_open(target), 7, 0)), 100))"),
}


#: What takes CAP_SYS_ADMIN, which an agent has over its own namespaces only.
ENTERING = {"nsenter", "nsenter user", "setns of a pidfd"}


async def test_looking_into_a_verifier(scene: Scene) -> None:
    for name, attack in LOOKING.items():
        rehearsed = await scene.rehearse(attack)
        assert (rehearsed.status == 0) is (BEST_RUNG.user_namespaces or name not in ENTERING), (name, rehearsed)
        done = await scene.attack(attack)
        assert done.status != 0, name
        assert is_refused(done, NOT_ALLOWED), (name, done)


async def test_the_agent_sees_the_verifiers_processes(scene: Scene) -> None:
    """As it sees its own: what a test script starts is no secret, what it holds is."""
    done = await scene.attack("pgrep -f '^bash /tests/test.sh'; cat /proc/$T/comm")
    assert done.lines == [scene.verifier.env["T"], "bash"]


# ---------------------------------------------------------------- disturbing it
SIGNALS = {
    "kill": "kill -KILL $T",
    "stop": "kill -STOP $T",
    "term": "kill -TERM $T",
    "probe": "kill -0 $T",
    "child": "kill -KILL $C",
    "stop child": "kill -STOP $C",
    "pidfd": python_attack("signal.pidfd_send_signal(os.pidfd_open(target), signal.SIGKILL)"),
    "tgkill": python_attack("check(libc.tgkill(target, target, 9))"),
    "sigqueue": python_attack("check(libc.sigqueue(target, 9, None))"),
    "proc descriptor": python_attack(
        "signal.pidfd_send_signal(os.open(f'/proc/{target}', os.O_RDONLY | os.O_DIRECTORY), signal.SIGSTOP)"
    ),
}


scoped = pytest.mark.skipif(sc.landlock_abi() < 6, reason="landlock has no scopes before Linux 6.12")


@scoped
async def test_signals_to_a_verifier(scene: Scene) -> None:
    for name, attack in SIGNALS.items():
        rehearsed = await scene.rehearse(attack)
        assert rehearsed.status == 0, (name, rehearsed)
        done = await scene.attack(attack)
        assert done.status != 0, name
        assert done.output.rstrip().endswith("Operation not permitted"), (name, done)


@scoped
async def test_killing_everybody(scene: Scene) -> None:
    service = scene.rig.start_sh(scene.sandbox, "echo up; exec sleep 1000")
    await service.said("up")
    assert (await scene.attack("kill -KILL -1")).status == 0
    assert (await service.done(2)).status == -9


@scoped
async def test_signals_by_descriptor_events(scene: Scene) -> None:
    """fcntl(F_SETOWN, F_SETSIG): the kernel signals another process when something can be read."""
    attack = python_attack("""
        ours, theirs = socket.socketpair()
        fcntl.fcntl(ours, fcntl.F_SETOWN, target)
        fcntl.fcntl(ours, 10, int(signal.SIGKILL))  # F_SETSIG
        fcntl.fcntl(ours, fcntl.F_SETFL, fcntl.fcntl(ours, fcntl.F_GETFL) | os.O_ASYNC)
        theirs.send(b"x")
        print("sent")
    """)
    killed = scene.rig.start_sh(scene.sandbox, "echo $$; exec sleep 1000")
    pid = (await killed.said("\n")).strip()
    await scene.rig.sh(scene.sandbox, attack, env=ENV | {"T": pid})
    assert (await killed.done(2)).status == -9, "the attack does not work at all"
    assert (await scene.attack(attack)).output == "sent\n"


async def test_the_user_of_a_verifiers_child_has_no_power_over_it(scene: Scene) -> None:
    for attack in ("cat /proc/$C/fd/0", "cat /proc/$C/environ", "cat /proc/$C/maps"):
        done = await scene.attack(f"{AS_ANOTHER_USER} bash -c '{attack}; exit'")
        assert done.status != 0, attack
        assert is_refused(done, NOT_ALLOWED), done


@pytest.mark.parametrize("limit", ["fsize=0:0", "nproc=0:0", "nofile=4:4", "cpu=1:1", "as=4096:4096"])
async def test_meddling_with_a_verifiers_limits(scene: Scene, limit: str) -> None:
    """prlimit(2) asks for the same user only. Without descriptors, `[ -z "$(check)" ]` is always true."""
    assert (await scene.attack(f"prlimit --{limit} --pid 0")).status == 0, "its own"
    done = await scene.attack(f"prlimit --{limit} --pid $T")
    assert done.status != 0, done
    assert is_refused(done, NOT_ALLOWED), done


async def test_meddling_with_the_limits_of_its_child(scene: Scene) -> None:
    done = await scene.attack(f"{AS_ANOTHER_USER} prlimit --pid $C --cpu=1:1")
    assert done.status != 0, done
    assert is_refused(done, NOT_ALLOWED), done


async def test_a_fork_bomb_does_not_keep_a_verifier_from_forking(rig: Rig) -> None:
    sandbox = await rig.create(limits=Limits(processes_max=40))
    bomb = python_attack("""
        try:
            while True:
                if os.fork() == 0:
                    signal.pause()
        except BlockingIOError:
            print("full", flush=True)
        signal.pause()
    """)
    running = rig.start_sh(sandbox, bomb, env=ENV | {"T": "1"})
    await running.said("full")
    if BEST_RUNG.has_id_range and BEST_RUNG.caps_processes:
        with pytest.raises(SandboxError, match="has reached its limit of processes"):
            await rig.sh(sandbox, "true")
    else:  # RLIMIT_NPROC counts when a process forks or changes its user, which is the launcher's; a cgroup at a fork
        assert (
            "Resource temporarily unavailable"
            in (await rig.sh(sandbox, "exec python3 -c 'import os; os.fork()'")).output
        )
    test = "for i in {1..50}; do sleep 1000 & done; echo $(ls /tests) $(jobs -p | wc -l)"
    assert (await rig.verify(sandbox, rig.layer(test=test))).output == "test.sh 50\n"


# ---------------------------------------------------------------- sockets
CONNECT = """
    import socket, sys
    with socket.socket(socket.AF_UNIX) as client:
        client.connect("\\0" + sys.argv[1])
        print(client.recv(100).decode())
"""
SERVE = """
    import socket, sys
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\\0" + sys.argv[1])
        server.listen()
        print("up", flush=True)
        while True:
            server.accept()[0].send(b"talked to")
"""


@scoped
async def test_abstract_sockets_of_verifiers_and_of_the_host_are_out_of_reach(rig: Rig) -> None:
    """They belong to the network, which is the host's here; with networks of their own nobody meets."""
    sandbox = await rig.create(network=Network.HOST)
    name = f"tbench2-test-{secrets.token_hex(4)}"
    agents = rig.start_sh(sandbox, python(SERVE, name + "-agent"))
    verifiers = rig.start_verifier(sandbox, rig.layer(test=python(SERVE, name + "-verifier")))
    for server in (agents, verifiers):
        await server.said("up")
    with socket.socket(socket.AF_UNIX) as host:
        host.bind(f"\0{name}-host")
        host.listen()
        assert (await rig.sh(sandbox, python(CONNECT, name + "-agent"))).output == "talked to\n"
        for whose in ("verifier", "host"):
            done = await rig.sh(sandbox, python(CONNECT, f"{name}-{whose}"))
            assert done.output.endswith("PermissionError: [Errno 1] Operation not permitted\n")
    verifiers.process.kill()
    await verifiers.done()
    assert (await rig.verify(sandbox, rig.layer(test=python(CONNECT, name + "-agent")))).output == "talked to\n"


KEYS = """
    import ctypes, os, sys
    libc = ctypes.CDLL(None, use_errno=True)
    add_key, keyctl = (248, 250) if os.uname().machine == "x86_64" else (217, 219)
    SESSION, SEARCH = -3, 10
    for action, name in zip(sys.argv[1::2], sys.argv[2::2]):
        if action == "add":
            found = libc.syscall(add_key, b"user", name.encode(), b"payload", 7, SESSION)
        else:
            found = libc.syscall(keyctl, SEARCH, SESSION, b"user", name.encode(), 0)
        print(action, "yes" if found >= 0 else os.strerror(ctypes.get_errno()))
"""


async def test_keys_of_the_host_and_of_others_are_out_of_reach(start_rig: StartRig) -> None:
    """A session keyring is inherited, and whoever possesses it can read its keys. Every container has one."""
    add_key, keyctl = (248, 250) if os.uname().machine == "x86_64" else (217, 219)
    libc = ctypes.CDLL(None)
    assert libc.syscall(keyctl, 1, None) >= 0  # this thread is in a new session from now on
    assert libc.syscall(add_key, b"user", b"hosts", b"payload", 7, -3) >= 0
    rig = await start_rig()
    sandbox, other = await rig.create(), await rig.create()
    assert (await rig.sh(sandbox, python(KEYS, "add", "agents", "find", "agents"))).lines == ["add yes", "find yes"]
    missing = "find Required key not available"
    assert (await rig.sh(sandbox, python(KEYS, "find", "hosts"))).lines == [missing]
    assert (await rig.sh(other, python(KEYS, "find", "agents"))).lines == [missing]
    layer = rig.layer(test=python(KEYS, "find", "agents", "find", "hosts"))
    assert (await rig.verify(sandbox, layer)).lines == [missing] * 2
