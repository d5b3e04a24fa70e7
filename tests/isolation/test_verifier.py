"""Verifiers: what they alone see, what they leave, and that they and the agent's services do not disturb each other."""

import asyncio
import os
import signal

import pytest

from tbench2_env.isolation.process import SandboxError
from tbench2_env.isolation.spec import CommandSpec

from .rig import AS_ANOTHER_USER, BEST_RUNG, Rig, first_process, is_alive, processes, stopped, unshare, until

#: What an agent sees of the verifier's folders at any time.
LOOK = "find /tests /logs -mindepth 1 | sort; touch /tests/x; touch /logs/verifier/x"
NOTHING = [
    "/logs/toolchain",
    "/logs/verifier",
    "touch: cannot touch '/tests/x': Read-only file system",
    "touch: cannot touch '/logs/verifier/x': Read-only file system",
]


# ---------------------------------------------------------------- what it sees
async def test_tests_and_logs_exist_for_the_verifier_alone(rig: Rig) -> None:
    sandbox = await rig.create()
    test = "find /tests /logs | sort; echo up; read; echo 1 >/logs/verifier/reward.txt"
    layer = rig.layer(test=test, tests={"a/b": "x"})
    assert (await rig.sh(sandbox, LOOK)).lines == NOTHING
    verifier = rig.start_verifier(sandbox, layer)
    assert (await verifier.said("up")).split() == [
        "/logs", "/logs/toolchain", "/logs/verifier", "/tests", "/tests/a", "/tests/a/b", "/tests/test.sh", "up",
    ]  # fmt: skip
    assert (await rig.sh(sandbox, LOOK)).lines == NOTHING
    verifier.say()
    assert (await verifier.done()).status == 0
    assert (await rig.sh(sandbox, LOOK)).lines == NOTHING


async def test_what_a_verifier_changes_of_its_tests_is_gone_with_it(rig: Rig) -> None:
    """Some harnesses build what they need beside their tests. What runs as one includes what the agent wrote, so the
    originals are out of its reach."""
    sandbox = await rig.create()
    changes = (
        "echo x >>/tests/test.sh && touch /tests/new && chmod 777 /tests && mv /tests/a /tests/b && rm -r /tests/d"
    )
    layer = rig.layer(test=f"ls /tests; {changes}; ls /tests; mount -o remount,rw /tests", tests={"a": "A", "d/e": "E"})
    for _ in range(2):
        assert (await rig.verify(sandbox, layer)).lines[:6] == ["a", "d", "test.sh", "b", "new", "test.sh"]
    tests = rig.spawner.layers / layer / "tests"
    assert {path.name for path in tests.rglob("*")} == {"test.sh", "a", "d", "e"}
    assert (tests / "test.sh").read_text().startswith("ls")
    assert tests.stat().st_mode & 0o777 == 0o755


async def test_one_for_a_sandbox_that_is_dying_is_refused_and_leaves_no_descriptor_open(rig: Rig) -> None:
    sandbox, layer = await rig.create(), rig.layer(test="true")
    first = first_process(await rig.pid_namespace(sandbox))
    command = rig.start_sh(sandbox, "echo up; exec sleep 1000")
    await command.said("up")
    with stopped(rig.launcher_pid):  # whose child keeps the sandbox from being dead
        os.kill(first, signal.SIGKILL)
        await until(lambda: not is_alive(first))
        for _ in range(3):
            with pytest.raises(SandboxError, match=r"No such|no sandbox"):
                await rig.start_verifier(sandbox, layer).done()
    assert await command.ended_with_its_sandbox()
    await sandbox.died


async def test_the_verifiers_mounts_cannot_be_taken_away_by_itself(rig: Rig) -> None:
    sandbox = await rig.create()
    test = "umount -l /tests /logs/verifier; mount -t tmpfs x /tests; cat /tests/secret"
    done = await rig.verify(sandbox, rig.layer(test=test, tests={"secret": "S"}))
    assert done.output.endswith("S"), done.output


async def test_it_shares_the_agents_files_and_namespaces(rig: Rig) -> None:
    sandbox = await rig.create(rig.layer({"app/x": "layer"}))
    await rig.sh(sandbox, "echo changed >/app/z; echo tmp >/tmp/y")
    names = "pid ipc uts cgroup net"
    layer = rig.layer(test=f"cat /app/* /tmp/y; hostname; id -u; cd /proc/self/ns; readlink {names}")
    done = await rig.verify(sandbox, layer)
    assert done.lines[:4] == ["layerchanged", "tmp", "tbench", "0"]
    assert done.lines[4:] == (await rig.sh(sandbox, f"cd /proc/self/ns; readlink {names}")).lines
    for name in ("mnt", "user") if BEST_RUNG.user_namespaces else ("mnt",):
        theirs = (await rig.sh(sandbox, f"readlink /proc/self/ns/{name}")).output
        assert (await rig.verify(sandbox, rig.layer(test=f"readlink /proc/self/ns/{name}"))).output != theirs


async def test_what_it_writes_elsewhere_stays_in_the_episode(rig: Rig) -> None:
    sandbox = await rig.create()
    await rig.verify(sandbox, rig.layer(test="echo from the verifier >/srv/x; ls -l /srv/x"))
    assert (await rig.sh(sandbox, "cat /srv/x; rm /srv/x; stat -c %u /srv")).lines == ["from the verifier", "0"]


async def test_its_command_environment_and_folder(rig: Rig) -> None:
    sandbox = await rig.create()
    command = CommandSpec("/bin/bash", ("bash", "-c", "pwd; echo $SECRET; set"), "/app/made", {"SECRET": "s3cret"})
    done = await rig.start_verifier_command(sandbox, command, rig.layer()).done()
    assert done.lines[:2] == ["/app/made", "s3cret"]
    assert "PYTHON" not in done.output


# ---------------------------------------------------------------- its files
async def test_its_files_are_read_from_the_host(rig: Rig) -> None:
    sandbox = await rig.create()
    assert list(sandbox.verifier_folder.iterdir()) == []
    test = "cd /logs/verifier; echo 0.5 >reward.txt; mkdir d; echo x >d/f; exit 3"
    assert (await rig.verify(sandbox, rig.layer(test=test))).status == 3
    assert (sandbox.verifier_folder / "reward.txt").read_text() == "0.5\n"
    assert (sandbox.verifier_folder / "d/f").read_text() == "x\n"
    assert (await rig.sh(sandbox, "ls -A /logs/verifier")).output == ""


async def test_verifications_in_a_row_start_with_an_empty_folder_and_the_original_tests(rig: Rig) -> None:
    sandbox = await rig.create()
    layer = rig.layer(test="ls -A /logs/verifier; cat /tests/number; echo $$ >/logs/verifier/$(cat /tests/number)")
    for number in range(3):
        (rig.spawner.layers / layer / "tests/number").write_text(str(number))
        assert (await rig.verify(sandbox, layer)).output == str(number)
        assert [path.name for path in sandbox.verifier_folder.iterdir()] == [str(number)]


async def test_two_tasks_in_a_row(rig: Rig) -> None:
    sandbox = await rig.create()
    for text in ("one", "other"):
        layer = rig.layer(test="ls /tests; cp /tests/own /logs/verifier", tests={"own": text})
        assert (await rig.verify(sandbox, layer)).lines == ["own", "test.sh"]
        assert (sandbox.verifier_folder / "own").read_text() == text


async def test_a_layer_without_tests_is_an_error(rig: Rig) -> None:
    sandbox = await rig.create()
    with pytest.raises(SandboxError, match="nosuchlayer"):
        await rig.verify(sandbox, "nosuchlayer")
    assert (await rig.verify(sandbox, rig.layer(test="echo fine"))).output == "fine\n"


async def test_a_verifier_that_cannot_be_started(rig: Rig) -> None:
    sandbox, layer = await rig.create(), rig.layer(test="echo fine")
    running = rig.start_verifier(sandbox, layer, path="/no/such/bash")
    with pytest.raises(SandboxError, match=r"/no/such/bash: .*No such file"):
        await running.process.wait()
    assert (await rig.verify(sandbox, layer)).output == "fine\n"


# ---------------------------------------------------------------- its processes
LEFT = f"""
sleep 3001 &
setsid sleep 3002 &
(setsid sleep 3003 &)
(setsid bash -c 'trap "" TERM HUP INT; sleep 3004; exit' &)
setsid {unshare("--user")} sleep 3005 &
setsid {unshare("--user --map-root-user --pid --fork --mount")} sleep 3006 &
setsid {AS_ANOTHER_USER} sleep 3007 &
until [ $(cat /proc/[0-9]*/cmdline | tr '\\0' '\\n' | sort -u | grep -c '^300[1-7]$') -eq 7 ]; do :; done
echo up
"""


async def test_what_a_finished_verifier_left_is_killed_and_the_agents_services_are_not(rig: Rig) -> None:
    sandbox = await rig.create()
    namespace = await rig.pid_namespace(sandbox)
    await rig.sh(sandbox, f"setsid sleep 2001 & (setsid {unshare('--user')} sleep 2002 &); echo")
    kept = ["init", "sleep 2001", "sleep 2002"]
    await until(lambda: sorted(processes([namespace]).values()) == kept, 5, lambda: processes([namespace]))
    done = await rig.verify(sandbox, rig.layer(test=LEFT + "exit 7"))
    assert (done.status, done.output) == (7, "up\n")
    await until(lambda: sorted(processes([namespace]).values()) == kept, 1, lambda: processes([namespace]))


@pytest.mark.parametrize(
    "last", ["sleep 99; exit", "exec sleep 1000", f"exec {unshare('--user')} sleep 1000", "kill -STOP $$"]
)
async def test_killing_a_verifier_kills_what_escaped_from_it(rig: Rig, last: str) -> None:
    sandbox = await rig.create()
    namespace = await rig.pid_namespace(sandbox)
    await rig.sh(sandbox, "setsid sleep 2001 & echo")
    verifier = rig.start_verifier(sandbox, rig.layer(test=LEFT + last))
    await verifier.said("up")
    verifier.process.kill()
    assert (await verifier.done(2)).status == -signal.SIGKILL
    await until(
        lambda: sorted(processes([namespace]).values()) == ["init", "sleep 2001"], 1, lambda: processes([namespace])
    )
    assert (await rig.verify(sandbox, rig.layer(test="echo fine"))).output == "fine\n"


async def test_killing_a_verifier_before_it_has_become_one(rig: Rig) -> None:
    sandbox, layer = await rig.create(), rig.layer(test="sleep 1000")
    for _ in range(5):
        verifier = rig.start_verifier(sandbox, layer)
        verifier.process.kill()
        assert (await verifier.done(2)).status == -signal.SIGKILL


async def test_the_agents_services_survive_the_verifier_and_are_visible_to_it(rig: Rig) -> None:
    sandbox = await rig.create()
    server = """
import http.server, os
os.chdir("/srv")
open("index.html", "w").write("served")
server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
open("/tmp/port.new", "w").write(str(server.server_port))
open("/tmp/pid", "w").write(str(os.getpid()))
os.rename("/tmp/port.new", "/tmp/port")
server.serve_forever()
"""
    await rig.sh(sandbox, f"setsid python3 -c '{server}' 2>/dev/null & until [ -e /tmp/port ]; do :; done")
    client = """
kill -0 $(cat /tmp/pid) && echo alive
exec 3<>/dev/tcp/127.0.0.1/$(cat /tmp/port) && printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3 && tail -1 <&3
"""
    for _ in range(2):
        assert (await rig.verify(sandbox, rig.layer(test=client))).output == "alive\nserved"
    assert (await rig.sh(sandbox, client)).output == "alive\nserved"


async def test_a_verifier_is_not_hurt_by_the_end_of_the_command_that_ran_before(rig: Rig) -> None:
    sandbox = await rig.create()
    command = rig.start_sh(sandbox, "echo up; sleep 1000")
    await command.said("up")
    verifier = rig.start_verifier(sandbox, rig.layer(test="echo up; read; echo 0 >/logs/verifier/reward.txt"))
    await verifier.said("up")
    command.process.kill()
    assert (await command.done(2)).status == -signal.SIGKILL
    verifier.say()
    assert (await verifier.done()).status == 0
    assert (sandbox.verifier_folder / "reward.txt").read_text() == "0\n"


async def test_a_command_that_starts_as_a_verifier_ends_is_not_taken_for_its_leftover(rig: Rig) -> None:
    sandbox, layer = await rig.create(), rig.layer(test="exit 0")
    for _ in range(10):
        verifier = rig.start_verifier(sandbox, layer)
        statuses = []
        while not verifier.process.exited.done():
            statuses += [one.status for one in await asyncio.gather(*(rig.sh(sandbox, "exit 4") for _ in range(4)))]
        assert set(statuses) == {4}


# ---------------------------------------------------------------- several
async def test_many_sandboxes_verify_at_once(rig: Rig) -> None:
    """All of them are in the middle of it at the same time, half of the same task."""
    test = "cd /logs/verifier; echo $(cat /tests/name /tmp/mine) | tee reward.txt; echo up; read; cat reward.txt"
    shared = rig.layer(test=test, tests={"name": "shared"})
    sandboxes = await asyncio.gather(*(rig.create() for _ in range(16)))
    verifiers = []
    for number, sandbox in enumerate(sandboxes):
        await rig.sh(sandbox, f"echo {number} >/tmp/mine")
        layer = shared if number % 2 else rig.layer(test=test, tests={"name": f"task{number}"})
        verifiers.append(rig.start_verifier(sandbox, layer))
    for verifier in verifiers:
        await verifier.said("up")
    for verifier in reversed(verifiers):
        verifier.say()
    for number, verifier in enumerate(verifiers):
        text = f"{'shared' if number % 2 else f'task{number}'}{number}"
        assert (await verifier.done()).output == f"{text}\nup\n{text}\n"
        assert (sandboxes[number].verifier_folder / "reward.txt").read_text() == text + "\n"


async def test_commands_run_beside_a_verifier(rig: Rig) -> None:
    sandbox = await rig.create()
    verifier = rig.start_verifier(sandbox, rig.layer(test="echo up; read line; cat /tmp/said; echo $line"))
    await verifier.said("up")
    assert (await rig.sh(sandbox, "echo hello >/tmp/said; cat /tmp/said")).output == "hello\n"
    verifier.say("done")
    assert (await verifier.done()).output == "up\nhello\ndone\n"
