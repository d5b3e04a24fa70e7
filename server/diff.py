"""What an episode changed, for its owner to read: the list, and one file's content. Nothing runs in the episode."""

import asyncio
import errno
import os
import posixpath
import stat
import urllib.parse
from collections.abc import AsyncIterator
from typing import BinaryIO, Literal

from tbench2_env.isolation.changes import Budget, Change, Folder, Kind, Worktree
from tbench2_env.server.episode import Episode
from tbench2_env.server.session import BadRequest
from tbench2_env.server.tampered import printable
from tbench2_env.server.wire import ChangedEntry, EpisodeDiff

#: Changes that are listed, and entries of the upper that are looked at for them.
LISTED_MAX = 10_000
_LOOKED_AT_MAX = 100_000
_CHUNK = 1 << 18
_TYPES: dict[int, Literal["file", "folder", "link"]] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "folder",
    stat.S_IFLNK: "link",
}
_LISTS = {Kind.ADDED: "added", Kind.RENAMED: "added", Kind.DELETED: "deleted"}


class NotChanged(Exception):
    """The episode did not change that path, or it has no content any more."""


async def list_changes(episode: Episode) -> EpisodeDiff:
    """Raises: EpisodeEnded, SandboxError."""
    return await asyncio.to_thread(_list, episode)


def _list(episode: Episode) -> EpisodeDiff:
    budget, listed = Budget(_LOOKED_AT_MAX), 0
    diff = EpisodeDiff(added=[], modified=[], deleted=[], unreadable=[], truncated=False)
    with episode.worktree() as worktree:
        for change in worktree.walk(worktree.root, budget):
            listed += 1
            if listed > LISTED_MAX:
                break
            if change.kind is Kind.UNREADABLE:
                diff.unreadable.append(printable(change.path))
            else:
                getattr(diff, _LISTS.get(change.kind, "modified")).append(_entry(change))
    diff.truncated = budget.exceeded or listed > LISTED_MAX
    return diff


def _entry(change: Change) -> ChangedEntry:
    info = change.now or change.before
    assert info is not None
    path = printable(change.path)
    return ChangedEntry.model_construct(
        path=path,
        type=_TYPES.get(stat.S_IFMT(info.st_mode), "other"),
        size=info.st_size,
        mode=f"{stat.S_IMODE(info.st_mode):o}",
        kind=change.kind,
        origin=printable(change.origin) or None,
        quoted=urllib.parse.quote(os.fsencode(change.path)) if os.fsencode(change.path) != path.encode() else None,
    )


def path_of_query(query: bytes, workdir: str) -> str:
    """The `path` of a query string as an absolute path, whatever bytes it has. Raises: BadRequest."""
    fields = urllib.parse.parse_qs(query.decode("ascii"), errors="surrogateescape", keep_blank_values=True)
    path = posixpath.normpath(posixpath.join("/", workdir, fields["path"][-1]))
    if path.strip("/") == "":
        raise BadRequest("path: / is a folder")
    return "/" + path.lstrip("/")


async def read_changed(episode: Episode, path: str) -> AsyncIterator[bytes]:
    """The content of a file that was added or changed, in chunks; errors come at once.

    Raises: NotChanged, BadRequest for what is no regular file, EpisodeEnded, SandboxError.
    """
    return _chunks(await asyncio.to_thread(_open, episode, path))


async def _chunks(file: BinaryIO) -> AsyncIterator[bytes]:
    with file:
        while chunk := await asyncio.to_thread(file.read, _CHUNK):
            yield chunk


def _open(episode: Episode, path: str) -> BinaryIO:
    with episode.worktree() as worktree:
        folder, name = _parent(worktree, path)
        change = worktree.look(folder, name)
        if change is None:
            raise NotChanged(f"path {printable(path)}: the episode did not change it")
        if change.now is None:
            raise NotChanged(f"path {printable(path)}: the episode deleted it")
        try:
            return os.fdopen(worktree.open_file(folder, name), "rb", buffering=0)
        except OSError as error:
            what = (
                "is not a regular file" if error.errno in (errno.EINVAL, errno.ELOOP, errno.ENXIO) else error.strerror
            )
            raise BadRequest(f"path {printable(path)}: {what}") from None


def _parent(worktree: Worktree, path: str) -> tuple[Folder, str]:
    parent, _, name = path.rpartition("/")
    folder = worktree.find(parent) if parent else worktree.root
    if isinstance(folder, Change) and folder.kind is Kind.UNREADABLE:
        raise BadRequest(f"path {printable(folder.path)}: the server may not look into this folder")
    if not isinstance(folder, Folder):
        raise NotChanged(f"path {printable(path)}: the episode did not change it, or it is gone or behind a link")
    return folder, name
