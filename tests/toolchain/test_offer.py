"""What a verifier is offered, by what the script wants, what the kit has, and whether there is a network."""

from pathlib import Path

import pytest

from tbench2_env.server.toolchain import offer
from tbench2_env.server.toolchain.kit import Kit
from tbench2_env.server.toolchain.offer import Offer
from tbench2_env.server.toolchain.uv_cache import Warm

from .test_kit import manifest

ENV = {"HOME": "/root", "PATH": "/usr/bin:/bin"}
COVERED = "curl -L https://x.invalid/uv/0.9.5/install.sh | sh\nuvx -p 3.13 -w a==1 -w b-c==2 a"
NO_WHEEL, NO_PYTHON = "uvx -p 3.13 -w z==1 a", "uvx -p 3.12 -w a==1 a"


def make(script: str, *, network: bool = False) -> Offer:
    return offer.make(Kit(Path("/kits/k"), manifest()), script, ENV, network=network)


def test_all_from_the_kit() -> None:
    made = make(COVERED)
    assert [(each.folder, each.place) for each in made.provided] == [("/kits/k", "/logs/toolchain")]
    assert made.refuse is None
    assert made.env == {
        "_TB2_UV": "offline",
        "PATH": "/logs/toolchain/bin:/usr/bin:/bin:/root/.local/bin",
        "UV_DOWNLOAD_URL": "file:///logs/toolchain/nothing",
        "APT_CONFIG": "/logs/toolchain/apt.conf",
    }
    assert made.describe == {
        "kit": "k", "uv": "0.9.5", "pythons": {"3.13": "3.13.5", "3.11": "3.11.2"}, "used": "offline", "missing": [],
        "unclear": [],
    }  # fmt: skip


def test_with_a_network_apt_is_left_alone() -> None:
    assert "APT_CONFIG" not in make(COVERED, network=True).env


@pytest.mark.parametrize(
    ("script", "mode", "missing"), [(NO_WHEEL, "online", ["a", "z==1"]), (NO_PYTHON, "plain", ["Python 3.12", "a==1"])]
)
def test_what_the_kit_has_not(script: str, mode: str, missing: list[str]) -> None:
    out = make(script, network=True)
    assert (out.env["_TB2_UV"], out.describe["missing"], out.refuse) == (mode, missing, None)
    alone = make(script).refuse
    assert alone is not None
    assert all(each in alone for each in missing)
    assert "tbench2 toolchain prepare" in alone


def test_pip() -> None:
    assert make("pip install a==1").env["PIP_INDEX_URL"] == "file:///logs/toolchain/index"
    out = make("pip install a==1", network=True).env
    assert out["PIP_FIND_LINKS"] == "/logs/toolchain/wheels"
    assert "PIP_INDEX_URL" not in out
    unknown = make("pip install z==1")
    assert not any(name.startswith("PIP_") for name in unknown.env), "the image may have it"
    assert unknown.refuse is None


def test_what_the_task_sets_itself_stays() -> None:
    own = {**ENV, "PIP_INDEX_URL": "https://x.invalid/simple", "APT_CONFIG": "/etc/mine"}
    made = offer.make(Kit(Path("/kits/k"), manifest()), "pip install a==1", own, network=False)
    assert not {"PIP_INDEX_URL", "APT_CONFIG"} & set(made.env)


def test_scripts_that_want_nothing() -> None:
    assert make("echo 1 > /logs/verifier/reward.txt", network=True) == Offer()


def test_the_uv_cache_stands_in_for_a_kit() -> None:
    warm = Warm(Path("/c/uv-cache"), Path("/c/store/x"))
    made = offer.make(None, NO_WHEEL, ENV, network=False, warm=warm)
    (provided,) = made.provided
    assert (provided.folder, provided.place, provided.writable) == ("/c/store/x", "/logs/toolchain", True)
    assert (made.env, made.refuse) == ({"UV_CACHE_DIR": "/logs/toolchain"}, None)
    assert made.describe == {"used": "uv cache", "cache": "/c/uv-cache"}
    for script in ("pip install a==1", "true"):
        assert not offer.make(None, script, ENV, network=False, warm=warm).provided
    assert make(COVERED) == offer.make(Kit(Path("/kits/k"), manifest()), COVERED, ENV, network=False, warm=warm)


@pytest.mark.parametrize(
    ("warm", "env", "why"),
    [
        (Warm(Path("/c"), why="it is on fire"), ENV, "the uv cache /c cannot be used: it is on fire"),
        (Warm(Path("/c"), Path("/s")), {**ENV, "UV_CACHE_DIR": "/mine"}, "not offered: the task sets UV_CACHE_DIR"),
    ],
)
def test_why_there_is_no_uv_cache(warm: Warm, env: dict[str, str], why: str) -> None:
    made = offer.make(None, COVERED, env, network=True, warm=warm)
    assert (made.provided, made.env, made.describe["used"]) == ((), {}, "nothing")
    assert why in made.describe["why"]


def test_without_a_kit() -> None:
    made = offer.make(None, COVERED, ENV, network=False)
    assert (made.provided, made.env, made.refuse) == ((), {}, None)
    assert made.describe["used"] == "nothing"
