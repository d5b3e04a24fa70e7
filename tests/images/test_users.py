"""Who a USER is, by the image's own files."""

from pathlib import Path

import pytest

from tbench2_env.server.images.layer import BaseView
from tbench2_env.server.images.users import ROOT, Account, UnknownUser, look_up

PASSWD = """root:x:0:0:root:/root:/bin/bash
app:x:1000:1001::/home/app:/bin/sh
homeless:x:7:7:::
twin:x:1000:5::/home/twin:
# a comment
broken:x:seven:7::/x:
short:x:8
"""
GROUP = """root:x:0:
app:x:1001:
crew:x:44:other,app
team:x:45:app
half:x:46
odd:x:many:app
"""


@pytest.fixture
def tree(tmp_path: Path) -> BaseView:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text(PASSWD)
    (tmp_path / "etc/group").write_text(GROUP)
    return BaseView(tmp_path)


@pytest.mark.parametrize(
    ("user", "account"),
    [
        (None, ROOT),
        ("", ROOT),
        ("root", ROOT),
        ("0", ROOT),
        ("0:0", ROOT),
        ("root:root", ROOT),
        ("root:crew", Account((0, 44), "/root")),
        ("app", Account((1000, 1001, 44, 45), "/home/app")),
        ("1000", Account((1000, 1001, 44, 45), "/home/app")),
        ("app:crew", Account((1000, 44), "/home/app")),
        ("app:", Account((1000, 1001, 44, 45), "/home/app")),
        ("app:9", Account((1000, 9), "/home/app")),
        ("twin", Account((1000, 5), "/home/twin")),
        ("homeless", Account((7, 7), "/")),
        ("1234", Account((1234, 0), "/")),
        ("1234:crew", Account((1234, 44), "/")),
        ("0:44", Account((0, 44), "/root")),
    ],
)
def test_users(tree: BaseView, user: str | None, account: Account) -> None:
    assert look_up(user, tree) == account


@pytest.mark.parametrize(
    ("user", "named"),
    [("ghost", "user 'ghost'"), ("app:ghost", "group 'ghost'"), ("broken", "user 'broken'"), ("-1", "user '-1'"),
     ("70000", "70000"), ("app:4000000000", "4000000000"), ("short", "user 'short'")],
)  # fmt: skip
def test_unknown_users(tree: BaseView, user: str, named: str) -> None:
    with pytest.raises(UnknownUser, match=named):
        look_up(user, tree)


def test_an_image_without_the_files(tmp_path: Path) -> None:
    tree = BaseView(tmp_path)
    assert look_up("root", tree) == ROOT
    assert look_up("5:6", tree) == Account((5, 6), "/")
    with pytest.raises(UnknownUser, match="add it, or use a number"):
        look_up("app", tree)


def test_links_lead_nowhere_else(tmp_path: Path, tree: BaseView) -> None:
    """As in an image whose /etc/passwd is a link: taken inside of it."""
    (tmp_path / "etc/passwd").rename(tmp_path / "etc/real")
    (tmp_path / "etc/passwd").symlink_to("/etc/real")
    assert look_up("app", tree).home == "/home/app"
    (tmp_path / "etc/passwd").unlink()
    (tmp_path / "etc/passwd").symlink_to("../" * 20 + "etc/os-release")
    with pytest.raises(UnknownUser):
        look_up("ID", tree)
