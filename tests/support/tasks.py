"""Folders of tasks: the samples with their pytest kit, and small ones made for one case."""

import importlib.metadata
import shutil
from collections.abc import Mapping
from pathlib import Path

SAMPLES = Path(__file__).resolve().parents[1] / "tasks"
_KIT = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
#: The task of CASES.md: solved when out.txt says ok.
OK_TEST = '[ "$(cat out.txt 2>/dev/null)" = ok ] && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n'
TOML = 'version = "1.0"\n[verifier]\ntimeout_sec = 30.0\n'
DOCKERFILE = "FROM debian:bookworm-slim\nWORKDIR /app\n"


def copy_samples(target: Path) -> list[str]:
    """Copy the sample tasks to `target`, with pytest beside the tests that want it; answers with their ids."""
    for task in sorted(SAMPLES.iterdir()):
        if (task / "task.toml").is_file():
            shutil.copytree(task, target / task.name, symlinks=True)
    copy_kit(target / "csv-ledger" / "tests" / "kit")
    return sorted(path.name for path in target.iterdir())


def copy_kit(target: Path) -> None:
    """pytest and what it needs, from the running interpreter; all of it is pure Python, so any Python 3 can use it."""
    for name in _KIT:
        distribution = importlib.metadata.distribution(name)
        for file in distribution.files or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(str(distribution.locate_file(file)), target / file)


def solution(task: Path) -> str:
    """The oracle's commands."""
    return (task / "solution" / "solve.sh").read_text()


def make_task(
    root: Path,
    name: str,
    test: str | None = OK_TEST,
    *,
    toml: str = TOML,
    dockerfile: str | None = DOCKERFILE,
    files: Mapping[str, str | bytes] = {},
) -> Path:
    """A small task; `test` None leaves out tests/. Its EXPECTEDKEY and ANSWERKEY must never reach an agent."""
    folder = root / name
    contents: dict[str, str | bytes] = {
        "instruction.md": f"Write ok to out.txt ({name}).\n",
        "task.toml": toml,
        "solution/solve.sh": "# ANSWERKEY\necho ok > out.txt\n",
        **files,
    }
    if dockerfile is not None:
        contents["environment/Dockerfile"] = dockerfile
    if test is not None:
        contents |= {"tests/test.sh": test, "tests/test_outputs.py": "# EXPECTEDKEY\n"}
    for path, content in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder
