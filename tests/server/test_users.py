"""User ids in an episode of real root are a machine's own: users, services, packages, ssh (CASES.md 24).

Tests of packages install them from Debian, inside an episode, and fail where its mirror cannot be reached.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.git import commit_all
from support.server import Server, idle_again
from support.tasks import make_task
from tbench2_env import Tbench2Env

INSTALL_TIMEOUT_S = 110
OWNER = 1000
#: What dpkg knows of the host: an episode must not change a byte.
DPKG = ("/var/lib/dpkg/status", "/var/lib/dpkg/lock", "/var/lib/apt/extended_states", "/etc/passwd", "/etc/shadow")


@pytest.fixture(scope="module")
def user_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`ok`; `copied`, whose Dockerfile copies a git repository of somebody else; `bare`, which is one itself."""
    folder = tmp_path_factory.mktemp("user-tasks")
    make_task(folder, "ok")
    make_task(folder, "copied", dockerfile="FROM debian:bookworm-slim\nWORKDIR /app\nCOPY repo /app\n")
    make_task(folder, "bare", dockerfile=None)
    for repository in (folder / "copied/environment/repo", folder / "bare"):
        repository.mkdir(exist_ok=True)
        (repository / "file").write_text("as it was\n")
        commit_all(repository)
        for path in (repository, *repository.rglob("*")):
            os.chown(path, OWNER, OWNER)
    return folder


@pytest.fixture(scope="module")
def shared_patient_server(tmp_path_factory: pytest.TempPathFactory, user_tasks: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("patient")
    server = Server(folder, user_tasks, {"TB2_COMMAND_TIMEOUT_S": str(INSTALL_TIMEOUT_S)}).start()
    yield server
    assert server.stop() == 0


@pytest.fixture
def patient_server(shared_patient_server: Server) -> Iterator[Server]:
    """One whose commands may take as long as installing packages does."""
    with idle_again(shared_patient_server):
        yield shared_patient_server


async def lines(env: Tbench2Env, command: str) -> list[str]:
    """What a command prints that succeeds."""
    answer = await env.exec("set -e\n" + command)
    assert answer.info.get("exit_code") == 0, answer.output[-2000:] + answer.error
    return answer.output.splitlines()


# ---------------------------------------------------------------- ids
async def test_users_and_owners(patient_server: Server) -> None:
    async with patient_server.client() as env:
        await env.reset(task_id="ok")
        made = "useradd -m -s /bin/bash dev; echo dev:secret | chpasswd; groupadd -g 4242 crew; usermod -aG crew dev"
        assert await lines(env, f"{made}; su dev -c 'id -un; id -Gn; cd; touch f; stat -c %U:%G f'") == [
            *("dev", "dev crew", "dev:dev")
        ]
        nobody = "su nobody -s /bin/true; su nobody -s /bin/sh -c 'id -u; touch /etc/x 2>/dev/null || echo no'"
        assert await lines(env, nobody) == ["65534", "no"]
        assert await lines(
            env, "touch a b; chown www-data:adm a; chown 1000 b; stat -c '%U %G %u' a; stat -c %u b"
        ) == [*("www-data adm 33", "1000")]
        private = "install -d -m 700 -o mail private; su www-data -s /bin/sh -c 'ls private 2>/dev/null || echo no'"
        assert await lines(env, private) == ["no"]


async def test_a_setuid_program_works_inside(patient_server: Server) -> None:
    async with patient_server.client() as env:
        await env.reset(task_id="ok")
        await lines(env, "cp /usr/bin/id /usr/local/bin/rid; chmod 4755 /usr/local/bin/rid")
        assert await lines(env, "su nobody -s /bin/sh -c 'rid -u; rid -ru'") == ["0", "65534"]


@pytest.mark.parametrize("task", ["copied", "bare"])
async def test_git_accepts_a_repository_of_somebody_else(patient_server: Server, user_tasks: Path, task: str) -> None:
    config = next(user_tasks.glob(f"{task}/**/.git/config")).read_text()
    async with patient_server.client() as env:
        await env.reset(task_id=task)
        assert await lines(env, "git status --porcelain file; git log --format=%s") == ["tasks"]
        assert await lines(
            env, "cat file; echo mine >>file; git diff --shortstat file; git checkout -q file; cat file"
        ) == [*("as it was", " 1 file changed, 1 insertion(+)", "as it was")]
        assert (await env.exec("cat .git/config")).output == config


# ---------------------------------------------------------------- packages
def fingerprints() -> dict[str, str]:
    return {path: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in DPKG if Path(path).exists()}


async def install(env: Tbench2Env, *packages: str) -> None:
    """From Debian; no other source of packages that the node may have is asked."""
    script = f"""
        export DEBIAN_FRONTEND=noninteractive
        find /etc/apt/sources.list.d -type f ! -name 'debian*' -delete
        echo man-db man-db/auto-update boolean false | debconf-set-selections
        apt-get -q update -o APT::Update::Error-Mode=any
        apt-get -qy install --no-install-recommends {" ".join(packages)}
    """
    await lines(env, script)


async def test_packages_are_installed_in_the_episode_alone(patient_server: Server) -> None:
    before = fingerprints()
    async with patient_server.client(INSTALL_TIMEOUT_S + 5) as env:
        await env.reset(task_id="ok")
        await install(env, "hello")
        assert await lines(env, "hello; dpkg-query -Wf '${Status}' hello") == ["Hello, world!", "install ok installed"]
    assert fingerprints() == before
    assert not Path("/usr/bin/hello").exists()


async def test_nginx_serves(patient_server: Server) -> None:
    async with patient_server.client(INSTALL_TIMEOUT_S + 5) as env:
        await env.reset(task_id="ok")
        await install(env, "nginx-light")
        assert await lines(env, "nginx; curl -s localhost | grep -o 'Welcome to nginx!' | head -1") == [
            "Welcome to nginx!"
        ]
        assert "www-data" in await lines(env, "ps -o user= -C nginx")


async def test_postgres_answers(patient_server: Server) -> None:
    async with patient_server.client(INSTALL_TIMEOUT_S + 5) as env:
        await env.reset(task_id="ok")
        await install(env, "postgresql")
        await lines(
            env, "service postgresql start >/dev/null; for i in {1..50}; do pg_isready -q && break; sleep 0.2; done"
        )
        assert await lines(env, "su postgres -c \"psql -Atc 'select 6*7, current_user'\"") == ["42|postgres"]
        assert set(await lines(env, "ps -o user= -C postgres")) == {"postgres"}


async def test_ssh_and_sudo(patient_server: Server) -> None:
    """A login with a key at a daemon of the episode's own, and another user's rights."""
    async with patient_server.client(INSTALL_TIMEOUT_S + 5) as env:
        await env.reset(task_id="ok")
        await install(env, "openssh-server", "openssh-client", "sudo")
        await lines(
            env, "useradd -m -s /bin/bash dev; mkdir -p /run/sshd; /usr/sbin/sshd; sudo -u dev mkdir -m 700 ~dev/.ssh"
        )
        await lines(
            env, "ssh-keygen -qt ed25519 -N '' -f ~/key; install -o dev -m 600 ~/key.pub ~dev/.ssh/authorized_keys"
        )
        ssh = "ssh -i ~/key -o StrictHostKeyChecking=no -o LogLevel=ERROR"
        assert await lines(env, f"{ssh} dev@localhost 'id -un; pwd'") == ["dev", "/home/dev"]
        assert await lines(env, f"{ssh} -tt dev@localhost 'tty | cut -d/ -f1-3' | tr -d '\\r'") == ["/dev/pts"]
        assert await lines(env, "sudo -u nobody id -u; sudo -u dev sh -c 'echo $USER $HOME'") == [
            "65534",
            "dev /home/dev",
        ]
