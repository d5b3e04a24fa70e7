"""One bad episode must not hurt another, nor see it: CASES.md 2 to 4 over the real server."""

import asyncio
import os
from pathlib import Path

from support.files import picture
from support.server import Server
from tbench2_env.isolation.spec import PRIVATE_FOLDERS, SYSTEM_FOLDERS


# ---------------------------------------------------------------- 2: files
async def test_two_episodes_of_one_task_have_their_own_files(server: Server, tasks: Path) -> None:
    on_disk = picture(tasks)
    async with server.client() as a, server.client() as b:
        # no-dockerfile's agents work in the task's own folder.
        reset = await a.reset(task_id="no-dockerfile")
        assert reset.observation.info["workdir"] == reset.observation.task_path == str(tasks / "no-dockerfile")
        await b.reset(task_id="no-dockerfile")
        before = (await b.exec("ls -lAR --time-style=+")).output
        assert "instruction.md" in before
        await a.exec("echo A > f; rm -r instruction.md notes; chmod 777 .; chmod +x task.toml; echo x >> task.toml")
        assert (await a.exec("ls -A")).output.split() == ["f", "task.toml"]
        assert (await b.exec("cat f")).output.endswith("No such file or directory\n")
        assert (await b.exec("ls -lAR --time-style=+")).output == before
    async with server.client() as c:
        await c.reset(task_id="no-dockerfile")
        assert (await c.exec("ls -lAR --time-style=+")).output == before
    assert picture(tasks) == on_disk


async def test_system_folders_are_copy_on_write(server: Server) -> None:
    async with server.client() as a, server.client() as b:
        await a.reset(task_id="ok")
        await b.reset(task_id="ok")
        await a.exec(
            "rm -rf /etc/skel; echo x > /usr/local/bin/x1; echo evil > /etc/passwd; mkdir /srv/x1; rm -rf /bin"
        )
        assert (await b.exec("ls /usr/local/bin/x1 /srv/x1")).output.count("No such file") == 2
        assert (await b.exec("ls -d /etc/skel; head -c 4 /etc/passwd")).output == "/etc/skel\nroot"
    assert Path("/etc/passwd").read_text().startswith("root")
    assert Path("/bin/bash").exists()
    assert not Path("/usr/local/bin/x1").exists()


# ---------------------------------------------------------------- 3: processes
async def test_killing_everything_in_sight_kills_only_the_own_episode(server: Server) -> None:
    async with server.client() as a, server.client() as b:
        await a.reset(task_id="ok")
        await b.reset(task_id="ok")
        before = server.descendants()
        alive = asyncio.create_task(b.exec("sleep 1; echo alive"))
        for command in ("pkill -9 -f python; true", "killall -9 bash", "kill -9 -1", "pkill -9 bash", "kill -9 1"):
            await a.exec(command)
        assert (await alive).output == "alive\n"
        assert (await b.exec("echo still here")).output == "still here\n"
        assert (await a.exec("echo me too")).output == "me too\n"
        assert server.process.poll() is None
        assert before.keys() <= server.descendants().keys(), "a helper or a PID 1 was replaced"


async def test_a_commands_text_is_in_nobodys_argv(server: Server) -> None:
    async with server.client() as env:
        await env.reset(task_id="ok")
        assert (await env.exec("pkill -f evaluate.py; echo rc=$?")).output == "rc=1\n"
        assert "MARKER" not in (await env.exec(": MARKER; cat /proc/[0-9]*/cmdline")).output


async def test_ps_shows_nothing_of_others(server: Server) -> None:
    async with server.client() as a, server.client() as b:
        await a.reset(task_id="ok")
        await b.reset(task_id="ok")
        await b.exec("sleep 612 & echo", block=True)
        await b.exec("sleep 613", session_id="t", block=False)
        assert (await b.exec("pgrep -c 'sleep'")).output == "2\n"
        lines = (await a.exec("ps axo comm=")).output.split()
        assert sorted(set(lines)) == ["bash", "memfd:start", "ps"]
        assert len((await a.exec("echo /proc/[0-9]*")).output.split()) == 2


async def test_ipc_and_hostname_are_private(server: Server) -> None:
    async with server.client() as a, server.client() as b:
        await a.reset(task_id="ok")
        await b.reset(task_id="ok")
        await a.exec("echo A > /dev/shm/x; hostname of-a")
        assert (await b.exec("ls -A /dev/shm; hostname; ipcs -m | grep -c 0x")).output == "tbench\n0\n"


# ---------------------------------------------------------------- 4: secrets and paths
async def test_temporary_and_home_folders_are_private(server: Server) -> None:
    async with server.client() as a, server.client() as b:
        await a.reset(task_id="ok")
        await b.reset(task_id="ok")
        look = "ls -A /tmp /var/tmp /root /home /run/lock; cat ~/.bashrc; git config --global --list"
        before = (await b.exec(look)).output
        await a.exec(
            "echo A > /tmp/x; echo A > /var/tmp/x; echo A > ~/.bashrc; git config --global user.name A; mkdir /home/a"
        )
        assert (await b.exec(look)).output == before
        assert "A" not in before.split()


async def test_no_secret_of_the_server_is_in_reach(server: Server) -> None:
    async with server.client() as env:
        await env.reset(task_id="ok")
        assert server.SECRET in Path(f"/proc/{server.pid}/environ").read_text()
        assert server.SECRET not in (await env.exec("env; cat /proc/*/environ; cat /proc/*/task/*/environ")).output
        await env.exec("bash -i", session_id="t", block=False)
        typed = await env.exec("env; cat /proc/*/environ", session_id="t2", block=False)
        assert "PATH=" in typed.output
        assert server.SECRET not in typed.output


async def test_no_host_path_is_visible(server: Server, tasks: Path) -> None:
    hidden = [tasks, server.runs, server.scratch, server.folder, Path.cwd(), Path(__file__)]
    async with server.client() as env:
        await env.reset(task_id="ok")
        listing = await env.exec(f"ls -d {' '.join(map(str, hidden))} 2>/dev/null; echo end")
        assert listing.output == "end\n"
        # In a path of its own, a Dockerfile-less task shows its own folder and nothing beside it.
        await env.reset(task_id="no-dockerfile")
        assert (await env.exec(f"ls -A {tasks}")).output.split() == ["no-dockerfile"]
        assert (await env.exec(f"ls -A {tasks.parent}")).output.split() == [tasks.name]


async def test_the_root_holds_only_the_allowed_folders(server: Server) -> None:
    private = {path.split("/")[0] for path in PRIVATE_FOLDERS}
    async with server.client() as env:
        await env.reset(task_id="ok")
        seen = set((await env.exec("ls -A /")).output.split())
        assert seen <= SYSTEM_FOLDERS | private | {"app"}
        assert {"app", "etc", "usr", "tmp", "proc"} <= seen
        assert (await env.exec("ls -A /root")).output.split() == [".bashrc", ".profile"]
        mounts = (await env.exec("cat /proc/self/mountinfo")).output
        for path in (server.scratch, server.runs, os.path.expanduser("~/")):  # noqa: PTH111 - with its slash
            assert str(path) not in mounts
