"""Episodes by id: the live ones, and what is remembered of those that ended."""

import asyncio
import collections
import datetime
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tbench2_env.server.ending import End

if TYPE_CHECKING:
    from tbench2_env.server.episode import Episode

#: Ended episodes that are remembered, so that acting on one is "ended", not "unknown".
_REMEMBERED_MAX = 10_000


class UnknownEpisode(Exception):
    """No episode of this server has, or lately had, this id."""


class NotKept(Exception):
    """There is such an episode, but not, or no longer, what was asked for of it."""


@dataclass(frozen=True)
class Ended:
    """What is left of an episode in memory."""

    episode_id: str
    task_id: str
    end: End
    message: str
    reward: float | None
    begun: datetime.datetime
    run_folder: Path


class Registry:
    """All episodes of a server, whoever began them."""

    def __init__(self) -> None:
        self._live: dict[str, Episode] = {}
        self._reserved: set[str] = set()
        self._ended: collections.OrderedDict[str, Ended] = collections.OrderedDict()

    def new_id(self, wanted: str | None) -> str:
        """`wanted`, unless a live episode has it: then with a number."""
        if wanted is None:
            return uuid.uuid4().hex
        number, name = 1, wanted
        while name in self._reserved or (name in self._live and self._live[name].state.terminal_ready):
            number += 1
            name = f"{wanted}.{number}"
        self._reserved.add(name)
        return name

    def add(self, episode: "Episode") -> None:
        self._reserved.discard(episode.episode_id)
        self._live[episode.episode_id] = episode
        self._ended.pop(episode.episode_id, None)

    def forget(self, episode_id: str) -> None:
        """The episode never came to be."""
        self._reserved.discard(episode_id)

    def remove(self, episode: "Episode", ended: Ended) -> None:
        if self._live.get(episode.episode_id) is episode:
            del self._live[episode.episode_id]
            self._ended[ended.episode_id] = ended
            while len(self._ended) > _REMEMBERED_MAX:
                self._ended.popitem(last=False)

    def get(self, episode_id: str) -> "Episode | Ended":
        """Raises: UnknownEpisode."""
        found = self._live.get(episode_id) or self._ended.get(episode_id)
        if found is None:
            raise UnknownEpisode(f"there is no episode {episode_id[:80]!r}: POST /episodes begins one")
        return found

    def live(self) -> "list[Episode]":
        """Oldest first."""
        return [episode for episode in self._live.values() if episode.state.terminal_ready]

    def ended(self) -> list[Ended]:
        """Oldest first."""
        return list(self._ended.values())

    async def end_all(self) -> None:
        await asyncio.gather(*(episode.discard(End.SHUTDOWN) for episode in self.live()))
