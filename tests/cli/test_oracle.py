"""`tbench2 oracle` on a running server: what becomes of good, bad and broken tasks."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from support.server import MakeServer, Server, free_port, idle_again
from support.tasks import SAMPLES as SAMPLES_FOLDER
from support.tasks import TOML, make_task
from tbench2_env.server.cli.main import main

from .conftest import Tbench2, results

SAMPLES = ("hello-note", "partial-credit", "tally-service")
#: Does what only works with all that belongs to a solution, in the working directory.
CAREFUL = """# a comment first, as in many tasks
#!/bin/bash
set -e
[ "$KEY" = "two words" ] && [ "$DEBIAN_FRONTEND" = noninteractive ]
[ -d /solution/empty ] && [ "$(readlink /solution/link)" = "data/it's" ]
cmp <(printf '\\0\\377') /solution/link
/solution/run > out.txt
echo done
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The results of one run over tasks of every kind; none is left running, and one alone lasts a second."""
    folder = tmp_path_factory.mktemp("oracle")
    tasks = folder / "tasks"
    careful = make_task(
        tasks, "careful", toml=TOML + '[solution.env]\nKEY = "two words"\n',
        files={
            "solution/solve.sh": CAREFUL, "solution/data/it's": b"\0\xff", "solution/run": "#!/bin/sh\necho ok\n",
        },
    )  # fmt: skip
    (careful / "solution" / "empty").mkdir()
    (careful / "solution" / "link").symlink_to("data/it's")
    (careful / "solution" / "run").chmod(0o755)
    make_task(tasks, "fails", files={"solution/solve.sh": "echo sorry; exit 3\n"})
    make_task(tasks, "hangs", toml=TOML + "[agent]\ntimeout_sec = 1\n", files={"solution/solve.sh": "sleep 60\n"})
    make_task(tasks, "no-reward", test="echo nothing; exit 4\n")
    make_task(tasks, "no-image", dockerfile="FROM debian\nFLY\n")
    make_task(tasks, "no-solution")
    (tasks / "no-solution" / "solution" / "solve.sh").unlink()
    server = Server(folder, tasks).start()
    try:
        with idle_again(server):
            out = folder / "out.json"
            shown = CliRunner(env={"TB2_TASKS_DIR": str(tasks)}).invoke(
                main, ["oracle", "--all", "-j", "6", "--server", server.url, "--out", str(out)]
            )
            assert shown.exit_code == 1, shown.output
    finally:
        server.stop()
    return results(out)


def test_a_solution_runs_with_its_files_and_variables(found: dict[str, dict[str, Any]]) -> None:
    result = found["careful"]
    assert (result["reward"], result["reason"], result["solve_exit_code"]) == (1.0, "", 0), result
    assert list(result["seconds"]) == ["reset", "solve", "evaluate"]
    assert (result["final"], result["solve_output"], result["tests_output"]) == (True, "", "")


def test_a_solution_that_fails_is_judged_all_the_same(found: dict[str, dict[str, Any]]) -> None:
    result = found["fails"]
    assert (result["reward"], result["solve_exit_code"], result["solve_output"]) == (0.0, 3, "sorry\n")
    assert (result["reason"], result["error"]) == ("solve_failed", "sorry")


def test_a_solution_gets_the_agents_time(found: dict[str, dict[str, Any]]) -> None:
    result = found["hangs"]
    assert (result["reward"], result["solve_timed_out"]) == (0.0, True)
    assert 1 <= result["seconds"]["solve"] < 10


def test_no_verdict_has_the_servers_reason(found: dict[str, dict[str, Any]]) -> None:
    result = found["no-reward"]
    assert (result["reward"], result["reason"], result["final"]) == (None, "reward_missing", True)
    assert result["tests_output"] == "nothing\n"
    assert "exit code 4" in result["error"]


def test_what_cannot_begin_is_not_final(found: dict[str, dict[str, Any]]) -> None:
    assert (found["no-image"]["reason"], found["no-image"]["final"]) == ("reset_failed", False)
    assert "FLY" in found["no-image"]["error"]
    assert (found["no-solution"]["reason"], found["no-solution"]["final"]) == ("no_solution", False)


def test_samples_with_and_without_their_solutions(server: Server, tbench2: Tbench2, tmp_path: Path) -> None:
    common = ("oracle", *SAMPLES, "-j", "3", "--server", server.url)
    shown = tbench2(*common, tasks=server.tasks)
    assert shown.exit_code == 0, shown.output
    assert "3 of 3 tasks: 3 with reward 1" in shown.output
    assert {name: result["reward"] for name, result in results(tmp_path / "oracle.json").items()} == dict.fromkeys(
        SAMPLES, 1.0
    )
    shown = tbench2(*common, "--without", tasks=server.tasks)
    assert shown.exit_code == 0, shown.output
    untouched = results(tmp_path / "untouched.json")
    assert {name: result["reward"] for name, result in untouched.items()} == dict.fromkeys(SAMPLES, 0.0)
    assert all("solve" not in result["seconds"] for result in untouched.values())


def test_every_sample_is_built_and_scores(
    make_server: MakeServer, tasks: Path, tbench2: Tbench2, tmp_path: Path
) -> None:
    """With the node's own root in the place of their base, under which their Dockerfiles are carried out."""
    server = make_server({"TB2_ENVIRONMENT": "build"})
    for more, reward in ((), 1.0), (("--without",), 0.0):
        out = tmp_path / f"{reward}.json"
        samples = [name for name in sorted(path.name for path in tasks.iterdir()) if (SAMPLES_FOLDER / name).is_dir()]
        done = tbench2("oracle", *samples, "-j", "4", *more, "--server", server.url, "--out", str(out), tasks=tasks)
        assert done.exit_code == 0, done.output
        assert {name: each["reward"] for name, each in results(out).items()} == dict.fromkeys(samples, reward)


def test_a_reset_has_a_limit(server: Server, tbench2: Tbench2, tmp_path: Path) -> None:
    shown = tbench2("oracle", "ok", "--server", server.url, "--reset-timeout-s", "0.001", tasks=server.tasks)
    assert shown.exit_code == 1
    result = results(tmp_path / "oracle.json")["ok"]
    assert (result["reason"], result["final"]) == ("reset_timeout", False)


def test_what_has_a_final_result_is_left(server: Server, tbench2: Tbench2, tmp_path: Path) -> None:
    run = ("oracle", "ok", "--server", server.url)
    tbench2(*run, tasks=server.tasks)
    first = (tmp_path / "oracle.json").read_bytes()
    again = tbench2(*run[:2], "--server", "http://127.0.0.1:9", tasks=server.tasks)  # nothing to do: it is not asked
    assert (again.exit_code, "earlier run" in again.output) == (0, True), again.output
    assert (tmp_path / "oracle.json").read_bytes() == first
    again = tbench2(*run, "--again", tasks=server.tasks)
    assert (again.exit_code, "earlier run" in again.output) == (0, False)
    assert (tmp_path / "oracle.json").read_bytes() != first


def test_a_server_with_a_token_and_fewer_slots(
    make_server: MakeServer, tbench2: Tbench2, small_tasks: Path, tmp_path: Path
) -> None:
    server = make_server({"TB2_AUTH_TOKEN": "s3cret", "MAX_CONCURRENT_ENVS": "2"}, tasks=small_tasks)
    run = ("oracle", "--all", "-j", "3", "--server", server.url)
    for env in ({}, {"TB2_AUTH_TOKEN": "another"}):
        refused = tbench2(*run, tasks=small_tasks, **env)
        assert refused.exit_code == 1
        assert "TB2_AUTH_TOKEN must hold the server's token" in refused.output
        assert results(tmp_path / "oracle.json") == {}
    shown = tbench2(*run, tasks=small_tasks, TB2_AUTH_TOKEN="s3cret")
    assert shown.exit_code == 0, shown.output
    assert "s3cret" not in (tmp_path / "oracle.json").read_text() + shown.output


def test_no_server(tbench2: Tbench2, small_tasks: Path) -> None:
    shown = tbench2("oracle", "a", "--server", f"http://127.0.0.1:{free_port()}", tasks=small_tasks)
    assert shown.exit_code == 1
    assert "Error: Failed to connect" in shown.output


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "name the tasks, or give --all"),
        (("a", "--all"), "name the tasks, or give --all"),
        (("nope",), "there is no task 'nope': give one of a, b, c"),
        (("a", "-j", "0"), "0 is not in the range x>=1"),
        (("a", "--out", "tasks/a/task.toml"), "not written by tbench2 oracle"),
    ],
)
def test_a_wrong_command_line(tbench2: Tbench2, small_tasks: Path, arguments: tuple[str, ...], why: str) -> None:
    shown = tbench2("oracle", *arguments, tasks=small_tasks)
    assert shown.exit_code != 0
    assert why in " ".join(shown.output.split())
