"""What this host can do, and what is said when it cannot."""

import os
from pathlib import Path

import pytest

from tbench2_env.isolation import probe, worktree
from tbench2_env.isolation import syscalls as sc
from tbench2_env.isolation.spec import Rung, SpawnerConfig

from .child import as_root, drop_capabilities, in_own_process, own_mounts, own_user_namespace
from .rig import BEST_RUNG, RUNGS_HERE, USER_NAMESPACES

#: Whose everything is that belongs to somebody outside of the user namespace.
OVERFLOW_ID = 65534


@in_own_process
def test_root_tries_the_best_rungs_first() -> None:
    tried = {"": ["1", "2", "3"], "no-userns": ["1", "2", "3"], "nobody": ["5"]}
    assert probe.candidate_rungs() == tried.get(os.environ.get("TB2_TEST_NODE", ""), ["E"])


@in_own_process
def test_anybody_else_makes_a_user_namespace() -> None:
    if USER_NAMESPACES:
        sc.unshare(sc.CLONE_NEWUSER)  # without a map nobody is root
    else:
        os.setresuid(1, 1, 1)
    assert probe.candidate_rungs() in (["4"], ["5"])


@in_own_process
def test_root_without_its_power_makes_a_user_namespace_over_its_own_files() -> None:
    drop_capabilities()
    assert probe.candidate_rungs() == ["5" if BEST_RUNG.foreign else "4"]


@in_own_process
def test_root_of_a_user_namespace_takes_the_enroot_rung() -> None:
    if not USER_NAMESPACES:
        with pytest.raises(OSError, match="user namespaces are switched off"):
            own_user_namespace()
        return
    own_user_namespace()
    assert probe.candidate_rungs() == ["E"]


@pytest.mark.parametrize("rung", RUNGS_HERE, ids=lambda rung: rung.name)
@as_root
def test_a_ground_is_prepared_and_tried(tmp_path: Path, rung: Rung) -> None:
    ground = probe.choose_ground(SpawnerConfig(rung.name, (str(tmp_path),)))
    assert ground.rung == rung
    assert list(tmp_path.iterdir()) == [Path(ground.folder)]
    assert Path.cwd() == Path(ground.folder)
    assert Path("base/usr/bin/env").read_bytes() == Path("/usr/bin/env").read_bytes()
    assert Path("base/usr/bin/env").stat().st_uid == (OVERFLOW_ID if rung.foreign else rung.owner_shift)
    with pytest.raises(OSError, match="Read-only file system"):
        Path("base/usr/tbench2-test").touch()
    assert list(Path("trash").iterdir()) == list(Path("episodes").iterdir()) == [], "what it tried with is left"
    worktree.demolish(ground.folder)
    assert list(tmp_path.iterdir()) == []


@as_root
def test_the_hosts_mounts_are_left_as_they_are(tmp_path: Path) -> None:
    host = Path(f"/proc/{os.getppid()}/mountinfo")
    before = host.read_text()
    probe.choose_ground(SpawnerConfig(BEST_RUNG.name, (str(tmp_path),), ()))
    assert str(tmp_path) in Path("/proc/self/mountinfo").read_text()
    assert host.read_text() == before


@as_root
def test_the_first_scratch_that_takes_an_overlay_is_chosen(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    scratch = (str(tmp_path / "file"), "/proc/nowhere", str(tmp_path / "good"), str(tmp_path / "better"))
    ground = probe.choose_ground(SpawnerConfig(BEST_RUNG.name, scratch, ()))
    assert Path(ground.folder).parent == tmp_path / "good"
    assert not (tmp_path / "better").exists()


@as_root
def test_every_refusal_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    """An upper on an overlay is refused by the kernel: so is every scratch folder in a docker container's own root."""
    own_mounts()
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    options = ",".join(f"{name}dir={tmp_path / name}" for name in ("lower", "upper", "work"))
    sc.mount("overlay", str(tmp_path / "merged"), "overlay", options=options)
    scratch = tmp_path / "merged/scratch"
    with pytest.raises(OSError, match=f"^scratch {scratch}: fsconfig.*; scratch /proc/nowhere: No such file"):
        probe.choose_ground(SpawnerConfig(BEST_RUNG.name, (str(scratch), "/proc/nowhere")))
    assert list(scratch.iterdir()) == []
    assert "/base " not in Path("/proc/self/mountinfo").read_text()
