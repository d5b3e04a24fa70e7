"""The write_file action: always as the agent, always inside the episode."""

import time
from pathlib import Path

import pytest

from support.server import Server


@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("out.txt", "/app/out.txt"),
        ("./a/../out.txt", "/app/out.txt"),
        ("deep/er/out.txt", "/app/deep/er/out.txt"),
        ("/tmp/new/out.txt", "/tmp/new/out.txt"),
        ("/etc/out.txt", "/etc/out.txt"),
        ("../up.txt", "/up.txt"),
        ("../../../../up.txt", "/up.txt"),
        ("-n", "/app/-n"),
        ("-e/--help", "/app/-e/--help"),
        ("a b 'c' \"d\" $HOME `id` *", "/app/a b 'c' \"d\" $HOME `id` *"),
        ("new\nline", "/app/new\nline"),
        ("~", "/app/~"),
        ("é漢🙂", "/app/é漢🙂"),
    ],
)
async def test_paths(server: Server, path: str, where: str) -> None:
    async with server.client() as env:
        await env.reset(task_id="ok")
        await env.exec("mkdir -p a")
        answer = await env.write_file(path, "text\n")
        assert (answer.success, answer.error) == (True, "")
        quoted = "'" + where.replace("'", "'\\''") + "'"
        assert (await env.exec(f"cat -- {quoted}; stat -c '%U %a' -- {quoted}")).output == "text\nroot 644\n"
    assert not Path(where).exists()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "no newline",
        "'quotes' \"double\" `id` $HOME $(id) \\ \\n %s\n",
        "EOF\n'EOF'\nEOF",
        "\r\n\t\x00\x01\x7f\x1b[31m",
        "é 漢 🙂\n",
        "'EOF'\n" * (1 << 20 >> 2),
    ],
    ids=["empty", "no-newline", "quotes", "eof", "control", "unicode", "6-MiB"],
)
async def test_content_arrives_as_it_is(server: Server, content: str) -> None:
    async with server.client() as env:
        await env.reset(task_id="ok")
        await env.exec("echo longer than what comes > f; chmod 755 f")
        assert (await env.write_file("f", content)).success
        assert (await env.exec("sha256sum < f | cut -d' ' -f1; stat -c %a f")).output.split() == [
            digest(content),
            "755",
        ]


def digest(content: str) -> str:
    import hashlib

    return hashlib.sha256(content.encode()).hexdigest()


async def test_a_link_leads_nowhere_outside(server: Server) -> None:
    host = Path("/etc/passwd").read_bytes()
    async with server.client() as a, server.client() as b:
        await a.reset(task_id="ok")
        await b.reset(task_id="ok")
        await a.exec(f"ln -s /etc/passwd link; ln -s {server.runs} runs; ln -s /proc/1/root/etc/passwd one")
        assert (await a.write_file("link", "x\n")).success
        assert (await a.exec("cat /etc/passwd")).output == "x\n"
        assert not (await a.write_file("runs/evil", "x")).success
        await a.write_file("one", "y\n")
        assert (await b.exec("head -c 5 /etc/passwd")).output == "root:"
    assert Path("/etc/passwd").read_bytes() == host
    assert not (server.runs / "evil").exists()


@pytest.mark.parametrize("path", ["", "a\0b", "folder/", "/", "x" * 5000])
async def test_a_wrong_path_is_refused_by_name(server: Server, path: str) -> None:
    async with server.client() as env:
        await env.reset(task_id="ok")
        answer = await env.write_file(path, "x")
        assert not answer.success
        assert "file_path" in answer.error
        assert len(answer.error) < 300


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/etc", "directory"),
        ("file/below", "file"),
        ("x" * 300, "too long"),
        ("loop/x", "symbolic links"),
        ("/proc/version", "denied"),
        ("/tests/x", "Read-only"),
        ("/logs/verifier/reward.txt", "Read-only"),
        ("/dev/full", "No space left"),
    ],
)
async def test_what_cannot_be_written_says_why(server: Server, path: str, why: str) -> None:
    async with server.client() as env:
        await env.reset(task_id="ok")
        await env.exec("touch file; ln -s loop loop")
        answer = await env.write_file(path, "x")
        assert not answer.success
        assert why.lower() in answer.error.lower()
        assert (await env.exec("echo ok")).output == "ok\n"


async def test_nobody_reads_the_fifo(quick_server: Server) -> None:
    async with quick_server.client() as env:
        await env.reset(task_id="ok")
        await env.exec("mkfifo pipe")
        begun = time.monotonic()
        answer = await env.write_file("pipe", "x")
        assert time.monotonic() - begun < 3
        assert (answer.success, "timed out" in answer.error) == (False, True)
        assert (await env.exec("pgrep -c cat; echo ok")).output == "0\nok\n"


async def test_the_agents_own_tools_cannot_change_what_is_written(server: Server) -> None:
    """cat and mkdir come from the agent's PATH only inside its own episode: a broken one is its own fault, and told."""
    async with server.client() as env:
        await env.reset(task_id="ok")
        await env.exec("printf '#!/bin/sh\\nexit 7\\n' > /usr/local/bin/cat; chmod +x /usr/local/bin/cat")
        answer = await env.write_file("f", "x")
        assert (answer.success, "exit code 7" in answer.error) == (False, True)
