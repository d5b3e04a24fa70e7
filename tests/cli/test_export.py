"""`tbench2 env export`: an environment leaves as an image, over a base with a shell and nothing else."""

import json
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from support.tasks import make_task

from .conftest import Program


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Tasks on the base `tiny`, and on one that is not to be had."""
    tasks, tiny = tmp_path / "tasks", tmp_path / "tiny"
    make_task(tasks, "t", dockerfile="FROM tiny\nENV A=b\nWORKDIR /app\nRUN echo hello > greeting\n")
    make_task(tasks, "homeless", dockerfile="FROM nothing:1\nWORKDIR /app\n")
    linked = subprocess.run(["ldd", "/bin/bash"], check=True, capture_output=True, text=True).stdout
    for path in ("/bin/bash", *re.findall(r"(/\S+) \(0x", linked)):
        target = tiny / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    (tiny / "bin/sh").symlink_to("bash")
    program = Program(tmp_path, tasks)
    program.env |= {"TB2_ENVIRONMENT": "build", "TB2_REGISTRY": "127.0.0.1:9", "TB2_BASES": f"tiny={tiny}"}
    return program


def blob(layout: Path, digest: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((layout / "blobs/sha256" / digest.removeprefix("sha256:")).read_bytes())
    return content


def names(layout: Path, digest: str) -> list[str]:
    with tarfile.open(layout / "blobs/sha256" / digest.removeprefix("sha256:")) as layer:
        return layer.getnames()


def test_an_image(program: Program, tmp_path: Path) -> None:
    done = program.run("env", "export", "t", "out")
    assert done.returncode == 0, done.stdout
    (described,) = json.loads((tmp_path / "out" / "index.json").read_text())["manifests"]
    assert f"out: t {described['digest']}" in done.stdout
    manifest = blob(tmp_path / "out", described["digest"])
    config = blob(tmp_path / "out", manifest["config"]["digest"])
    assert config["config"]["WorkingDir"] == "/app"
    assert "A=b" in config["config"]["Env"]
    files = {name for layer in manifest["layers"] for name in names(tmp_path / "out", layer["digest"])}
    assert {"bin/bash", "app/greeting"} <= files
    assert program.run("env", "export", "t", "out").returncode == 1  # it exists


def test_what_lies_over_the_nodes_root_is_none(program: Program, tmp_path: Path) -> None:
    done = program.run("env", "export", "homeless", "out")
    assert done.returncode == 1
    assert "the node's root is no image" in done.stdout
    assert "Traceback" not in done.stdout
    assert not (tmp_path / "out").exists()
