"""Users of an image, looked up in its own /etc/passwd and /etc/group, as docker does for USER."""

import re
from dataclasses import dataclass

from tbench2_env.isolation.spec import ID_COUNT
from tbench2_env.server.images.layer import BaseView, lstat, resolve

_NUMBER = re.compile("[0-9]{1,9}")


class UnknownUser(Exception):
    """The image has no such user or group; the text names it."""


@dataclass(frozen=True)
class Account:
    """`ids` are user, group and supplementary groups; none for root, who needs no change."""

    ids: tuple[int, ...] = ()
    home: str = "/root"


ROOT = Account()


def look_up(user: str | None, tree: BaseView) -> Account:
    """The account that `user[:group]`, names or numbers, means in the image `tree`. Raises: UnknownUser."""
    wanted, _, group = (user or "root").partition(":")
    found = _user(wanted, _table(tree, "/etc/passwd"))
    rows = filter(_has_id, _table(tree, "/etc/group"))
    groups = [_Group(row[0], int(row[2]), ",".join(row[3:]).split(",")) for row in rows]
    mine = (each.gid for each in groups if found.name and found.name in each.members and each.gid < ID_COUNT)
    others = () if group else tuple(mine)
    uid, gid = found.uid, _gid(group, groups) if group else found.gid
    if max(uid, gid) >= ID_COUNT:
        raise UnknownUser(f"{user} has the id {max(uid, gid)}: episodes have ids up to {ID_COUNT - 1}")
    return Account(() if uid == gid == 0 else (uid, gid, *others), found.home)


@dataclass(frozen=True)
class _User:
    name: str
    uid: int
    gid: int
    home: str


@dataclass(frozen=True)
class _Group:
    name: str
    gid: int
    members: list[str]


def _user(wanted: str, passwd: list[list[str]]) -> _User:
    """By name or number; the first row counts (moby/sys/user, GetExecUser)."""
    for row in passwd:
        if len(row) >= 6 and wanted in (row[0], row[2]) and _has_id(row) and row[3].isdecimal():
            return _User(row[0], int(row[2]), int(row[3]), row[5] or "/")
    if _NUMBER.fullmatch(wanted):
        return _User("", int(wanted), 0, "/")
    if wanted == "root":
        return _User(wanted, 0, 0, "/root")
    raise UnknownUser(f"the image's /etc/passwd has no user {wanted!r}: add it, or use a number")


def _gid(wanted: str, groups: list[_Group]) -> int:
    for group in groups:
        if wanted in (group.name, str(group.gid)):
            return group.gid
    if _NUMBER.fullmatch(wanted):
        return int(wanted)
    raise UnknownUser(f"the image's /etc/group has no group {wanted!r}: add it, or use a number")


def _has_id(row: list[str]) -> bool:
    return len(row) >= 3 and row[2].isdecimal()


def _table(tree: BaseView, path: str) -> list[list[str]]:
    file = tree.host(resolve(tree, path))
    text = file.read_text(errors="replace") if lstat(file) else ""
    return [line.split(":") for line in text.splitlines()]
