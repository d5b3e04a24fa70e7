"""The kit's folder: published whole, found by its link, and what it says it covers."""

import os
from pathlib import Path

import pytest

from tbench2_env.server.toolchain import kit as kits
from tbench2_env.server.toolchain.kit import Kit, Manifest, Python, Resolved
from tbench2_env.server.toolchain.pins import Environment, Pins


def manifest(**changes: object) -> Manifest:
    whole = {
        "made": "2026-01-01T00:00:00+00:00", "uv": "0.9.5", "machine": os.uname().machine, "loader": "/lib64/ld.so",
        "pythons": {"3.13": Python(release="3.13.5", glibc=38, source="/usr/bin/python3.13"),
                    "3.11": Python(release="3.11.2", glibc=36, source="/usr/bin/python3.11")},
        "wheels": {"a-1-py3-none-any.whl": "00"},
        "resolved": (Resolved(python="3.13", requirements=("A==1", "b-c==2"), wheels=("a-1-py3-none-any.whl",)),
                     Resolved(python="3.13", requirements=("d==1",), wheels=())),
        **changes,
    }  # fmt: skip
    return Manifest.model_validate(whole)


def publish(cache: Path, **changes: object) -> Kit:
    made = kits.folder_of(cache) / "making-1"
    made.mkdir(parents=True, exist_ok=True)
    (made / "program").write_text("x")
    (made / "program").chmod(0o700)
    return kits.publish(made, manifest(**changes))


def current(cache: Path) -> str | None:
    opened = Kit.open(cache)
    return None if opened is None else opened.digest


def test_none_at_first(tmp_path: Path) -> None:
    assert Kit.open(tmp_path) is None


def test_the_last_published_is_current_and_the_one_before_stays(tmp_path: Path) -> None:
    first = publish(tmp_path)
    assert current(tmp_path) == first.digest
    second = publish(tmp_path, uv="0.9.6")
    assert current(tmp_path) == second.digest != first.digest
    assert (first.folder / "program").stat().st_mode & 0o777 == 0o555
    third = publish(tmp_path, uv="0.9.7")
    left = {path.name for path in kits.folder_of(tmp_path).iterdir()}
    assert left == {kits.CURRENT, second.digest, third.digest}


def test_publishing_the_same_again(tmp_path: Path) -> None:
    first = publish(tmp_path)
    assert publish(tmp_path, made="later", problems=("x",)).folder == first.folder


@pytest.mark.parametrize("changes", [{"machine": "vax"}, {"format": 0}])
def test_of_another_machine_or_program(tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="another version of this program or for another kind of machine"):
        publish(tmp_path, **changes)
    assert Kit.open(tmp_path) is None


def test_a_broken_manifest_is_no_kit(tmp_path: Path) -> None:
    folder = publish(tmp_path, uv="1.0").folder
    (folder / kits.MANIFEST).chmod(0o644)
    (folder / kits.MANIFEST).write_text("{")
    assert Kit.open(tmp_path) is None


@pytest.mark.parametrize(
    ("python", "requirements", "missing"),
    [
        ("3.13", ("a==1", "B_C==2"), []),
        ("3.13", ("b.c==2",), []),
        ("3.13", ("a==1", "d==1"), ["d==1"]),
        ("3.13", ("a==2",), ["a==2"]),
        ("3.13", ("a",), ["a"]),
        ("3.11", ("a==1",), ["a==1"]),
        (None, ("a==1",), []),
        ("3.12", ("a==1", "d==1"), ["a==1", "d==1"]),
    ],
)
def test_what_is_covered(tmp_path: Path, python: str | None, requirements: tuple[str, ...], missing: list[str]) -> None:
    kit = Kit(tmp_path, manifest())
    assert kit.missing(Environment("uv", python, requirements)) == missing


def test_pythons_and_levels(tmp_path: Path) -> None:
    kit = Kit(tmp_path, manifest())
    assert kit.missing_pythons(Pins(pythons=("3.12", "3.13"))) == ["3.12"]
    assert kit.manifest.levels == [0, 36, 38]
