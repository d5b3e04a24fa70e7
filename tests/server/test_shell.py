"""Commands over the server: what they see, what comes back, and what they leave behind (CASES.md 15, 17)."""

import os
import signal
import time

import pytest

from support.server import Server, free_port
from support.talk import observation, wire
from tbench2_env import Tbench2Env
from tbench2_env.server.shell import Caller, environment, in_memory

from .conftest import AddTask

#: A command that waits for something does so until its limit, 20 s.
HANG_S = 10


# ---------------------------------------------------------------- units
def test_later_layers_of_the_environment_win() -> None:
    merged = environment({"HOME": "/a", "X": "1"}, {"X": "2"})
    assert (merged["HOME"], merged["X"], merged["LANG"]) == ("/a", "2", "C.UTF-8")
    assert environment()["HOME"] == "/root", "a layer changed the fixed list"


def test_data_in_memory_is_read_from_its_start() -> None:
    data = os.urandom(3 << 20)
    with in_memory(data, "x") as fd, os.fdopen(os.dup(fd), "rb") as file:
        assert file.read() == data


def test_a_path_is_an_argument_not_shell_text() -> None:
    assert Caller("/", {}).write("a; rm -rf '").argv[-1] == "a; rm -rf '"


# ---------------------------------------------------------------- results
async def started(env: Tbench2Env) -> Tbench2Env:
    await env.reset(task_id="ok")
    return env


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("exit 3", 3),
        ("false", 1),
        ("kill -9 $$", 128 + signal.SIGKILL),
        ("kill -TERM $$", 128 + signal.SIGTERM),
        ("sh -c 'kill -SEGV $$'", 128 + signal.SIGSEGV),
        ("no-such-program", 127),
        ("/etc/passwd", 126),
        ("", 0),
        (" \n# nothing\n", 0),
        ("set -e; false; echo never", 1),
        ("exec sh -c 'exit 9'", 9),
    ],
)
async def test_an_exit_status_is_a_result_not_a_failure(server: Server, command: str, code: int) -> None:
    async with server.client() as env:
        answer = await (await started(env)).exec(command)
        assert answer.info["exit_code"] == code
        assert (answer.success, answer.error, answer.info["timed_out"]) == (True, "", False)
        assert "never" not in answer.output


@pytest.mark.parametrize("command", ["if", "echo 'abc", 'echo "abc', "(", "done", "echo $(", "case x in", "}"])
async def test_a_syntax_error_is_told_and_the_next_command_works(server: Server, command: str) -> None:
    async with server.client() as env:
        answer = await (await started(env)).exec(command)
        assert answer.success
        assert answer.info["exit_code"] != 0
        assert answer.output.startswith("bash: ")
        assert (await env.exec("echo ok")).output == "ok\n"


async def test_output_is_both_streams_in_order_and_unchanged(server: Server) -> None:
    async with server.client() as env:
        answer = await (await started(env)).exec("echo 1; echo 2 >&2; printf 3; printf '4\\n\\n' >&2")
        assert answer.output == "1\n2\n34\n\n"
        assert answer.info["output_bytes"] == 8
        assert (await env.exec("printf ''")).output == ""
        assert (await env.exec("printf '\\xff\\303\\251\\xc3'")).output == "�é�"
        assert (await env.exec("printf '\\033[31mred\\033[0m\\033]0;title\\007!'")).output == "red!"


async def test_text_reaches_bash_as_it_is(server: Server) -> None:
    text = "quotes ' \" ` \\ $HOME $(id) !! * ~ {a,b} é 漢字 🙂 \t EOF"
    async with server.client() as env:
        await started(env)
        assert (await env.exec(f"cat <<'EOF'\n{text}\nEOF")).output == text + "\n"
        assert (await env.exec("echo '🙂' | wc -c; echo a\\\nb")).output == "5\nab\n"
        assert (await env.exec("echo a\0b\0")).output == "ab\n"
        assert (await env.exec("echo one\r\n")).output == "one\r\n"


@pytest.mark.parametrize("size", [200_000, 1 << 20, 5 << 20])
async def test_commands_of_any_length(server: Server, size: int) -> None:
    async with server.client() as env:
        await started(env)
        answer = await env.exec(f"cat <<'END' | wc -c\n{'x' * (size - 1)}\nEND")
        assert answer.output == f"{size}\n"
        assert (await env.exec(f"v='{'y' * size}'; echo ${{#v}}")).output == f"{size}\n"


async def test_a_lone_surrogate_does_not_end_the_session(server: Server) -> None:
    async with wire(server) as session:
        await session.reset()
        answer = await session.ask_raw('{"type": "step", "data": {"command": "echo \\ud800"}}')
        assert observation(answer)["output"] == "���\n"  # no valid UTF-8 when bash prints it
        assert (await session.step(command="echo ok"))["output"] == "ok\n"


# ---------------------------------------------------------------- what a command sees
async def test_the_environment_is_the_fixed_list_and_the_tasks_own(server: Server, add_task: AddTask) -> None:
    task = add_task(
        None,
        dockerfile='FROM debian\nENV GREETING="hello there" PATH=/opt/x/bin:$PATH\nWORKDIR /app\n',
        toml='[environment.env]\nLEVEL = "7"\nGREETING2 = "a=b c"\n',
    )
    async with server.client() as env:
        await env.reset(task_id=task)
        answer = await env.exec("exec env")
        assert dict(line.split("=", 1) for line in answer.output.splitlines()) == {
            "PATH": "/opt/x/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "LANG": "C.UTF-8",
            "TERM": "xterm-256color",
            "GREETING": "hello there",
            "GREETING2": "a=b c",
            "LEVEL": "7",
            "PWD": "/app",
            "SHLVL": "0",
        }


async def test_a_command_starts_clean(server: Server) -> None:
    async with server.client() as env:
        await started(env)
        assert (await env.exec("exec python3 -c 'import os; print(sorted(os.listdir(\"/proc/self/fd\")))'")).output == (
            "['0', '1', '2', '3']\n"  # 3 is listdir's own
        )
        assert (await env.exec("pwd; whoami; hostname; umask; ulimit -c")).output.split()[:4] == [
            "/app", "root", "tbench", "0022",
        ]  # fmt: skip
        assert (await env.exec("grep -E 'Sig(Blk|Ign)' /proc/self/status | cut -f2")).output == "0" * 16 + "\n" + (
            "0" * 16 + "\n"
        )
        # Nothing of one command's shell state is the next one's.
        await env.exec("cd /etc; export X=1; f() { :; }; set -e; umask 077")
        assert (await env.exec("pwd; echo ${X-unset}; type f; umask")).output.split("\n")[:2] == ["/app", "unset"]


async def test_a_removed_working_directory_is_made_again(server: Server) -> None:
    async with server.client() as env:
        await started(env)
        await env.exec("rm -rf /app")
        assert (await env.exec("pwd; ls -A")).output == "/app\n"
        await env.exec("rm -rf /app; echo in the way > /app")
        answer = await env.exec("pwd; rm /app")
        assert (answer.success, answer.output) == (True, "/\n")
        assert (await env.exec("pwd")).output == "/app\n"


# ---------------------------------------------------------------- 15: background children
async def test_a_background_child_does_not_hold_up_the_answer(server: Server) -> None:
    port = free_port()
    async with server.client() as env:
        await started(env)
        begun = time.monotonic()
        answer = await env.exec(f"python3 -m http.server {port} --bind 127.0.0.1 & echo started")
        assert time.monotonic() - begun < HANG_S
        assert answer.output == "started\n"
        assert answer.info["exit_code"] == 0
        fetch = f"for i in $(seq 100); do curl -sf 127.0.0.1:{port} >page && break; sleep 0.05; done; grep -c ul page"
        assert int((await env.exec(fetch)).output) > 0


async def test_a_background_child_may_print_for_ever(server: Server) -> None:
    """More than a pipe holds, long after its command ended: neither SIGPIPE nor a stuck write."""
    async with server.client() as env:
        await started(env)
        child = "(until [ -e go ]; do sleep 0.02; done; head -c 3000000 /dev/zero; echo $? > done; sleep 600) & echo up"
        assert (await env.exec(child)).output == "up\n"
        assert (await env.exec("true")).success
        await env.exec("touch go")
        waited = await env.exec(
            "for i in $(seq 300); do [ -e done ] && break; sleep 0.05; done; cat done; pgrep -c sleep"
        )
        assert waited.output == "0\n1\n"


async def test_output_of_a_background_child_stays_out_of_later_commands(server: Server) -> None:
    async with server.client() as env:
        await started(env)
        await env.exec("(until [ -e go ]; do sleep 0.02; done; echo late; touch done) & true")
        answer = await env.exec("touch go; until [ -e done ]; do sleep 0.02; done; echo mine")
        assert answer.output == "mine\n"


# ---------------------------------------------------------------- 17: standard input and heredocs
@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("cat; echo rc=$?", "rc=0\n"),
        ("read x; echo rc=$?", "rc=1\n"),
        ("read x </dev/tty; echo rc=$?", "bash: line 1: /dev/tty: No such device or address\nrc=1\n"),
        ("python3; echo rc=$?", "rc=0\n"),
        ("python3 -", ""),
        ("bash", ""),
        ("cat <<EOF\na $((1+1))\nEOF", "a 2\n"),
        ("cat <<'EOF'\na $x 'b'\nEOF\necho after", "a $x 'b'\nafter\n"),
        ("python3 - <<'EOF'\nprint('hi')\nEOF", "hi\n"),
        ("[ -t 0 ] || [ -t 1 ] || [ -t 2 ]; echo $?", "1\n"),
        ("git commit --allow-empty 2>/dev/null; passwd >/dev/null 2>&1; echo x", "x\n"),
    ],
)  # fmt: skip
async def test_nothing_waits_for_input(server: Server, command: str, output: str) -> None:
    async with server.client() as env:
        await started(env)
        begun = time.monotonic()
        answer = await env.exec(command)
        assert time.monotonic() - begun < HANG_S
        assert (answer.success, answer.output) == (True, output)
        assert (await env.exec("echo next")).output == "next\n"


async def test_an_unterminated_heredoc_runs_with_a_warning(server: Server) -> None:
    async with server.client() as env:
        await started(env)
        begun = time.monotonic()
        answer = await env.exec("cat > f <<'EOF'\nline\n")
        assert time.monotonic() - begun < HANG_S
        assert "delimited by end-of-file" in answer.output
        assert (await env.exec("cat f")).output == "line\n"
