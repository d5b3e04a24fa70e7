"""HTTP routes for the evidence of an episode's last evaluation, live or ended, as it lies in the run's folder."""

import asyncio
import os
from pathlib import Path
from typing import Any, BinaryIO

from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from tbench2_env.server import evidence, runs
from tbench2_env.server.problems import responses
from tbench2_env.server.registry import NotKept, UnknownEpisode
from tbench2_env.server.services import Services
from tbench2_env.server.wire import CtrfReport, EpisodeId, VerdictAnswer

_CHUNK = 1 << 16
_TEXT: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
_LOG = f"{evidence.FOLDER}/{evidence.LOG}"
_REPORT = f"{evidence.FOLDER}/{evidence.REPORT}"


def add_routes(app: FastAPI, services: Services) -> None:
    @app.get(
        "/episodes/{episode_id}/verdict", tags=["Verdicts"], response_class=StreamingResponse,
        responses=responses(404, 422) | {200: {"model": VerdictAnswer}},
    )  # fmt: skip
    async def verdict(episode_id: EpisodeId) -> StreamingResponse:
        """What the last evaluation answered. Episodes that have ended are answered for while their results are kept."""
        return await _send(services, episode_id, runs.VERDICT, "application/json")

    @app.get(
        "/episodes/{episode_id}/verifier/log", tags=["Verdicts"], response_class=StreamingResponse,
        responses=responses(404, 422) | {200: {"content": _TEXT}},
    )  # fmt: skip
    async def log(episode_id: EpisodeId) -> StreamingResponse:
        """What the last evaluation's tests/test.sh printed, within TB2_OUTPUT_LIMIT_BYTES, control characters too."""
        return await _send(services, episode_id, _LOG, "text/plain; charset=utf-8")

    @app.get(
        "/episodes/{episode_id}/verifier/ctrf", tags=["Verdicts"], response_class=StreamingResponse,
        responses=responses(404, 422) | {200: {"model": CtrfReport}},
    )  # fmt: skip
    async def ctrf(episode_id: EpisodeId) -> StreamingResponse:
        """The CTRF report (ctrf.io) that the last evaluation's tests/test.sh wrote, unchecked."""
        return await _send(services, episode_id, _REPORT, "application/json")


async def _send(services: Services, episode_id: str, name: str, media_type: str) -> StreamingResponse:
    """Raises: UnknownEpisode, NotKept."""
    folder = await _folder(services, episode_id)
    try:
        file = await asyncio.to_thread((folder / name).open, "rb")
    except OSError:
        raise NotKept(f"there is no {name} of episode {episode_id[:80]!r}: it was not evaluated, or not kept") from None
    return _FileAnswer(file, media_type)


class _FileAnswer(StreamingResponse):
    """An open file, which is closed also when the client hangs up: it may have been replaced by then."""

    def __init__(self, file: BinaryIO, media_type: str) -> None:
        # A harness decides what is in these files: nobody is to guess at another type.
        headers = {"content-length": str(os.fstat(file.fileno()).st_size), "x-content-type-options": "nosniff"}
        super().__init__(iter(lambda: file.read(_CHUNK), b""), media_type=media_type, headers=headers)
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)


async def _folder(services: Services, episode_id: str) -> Path:
    try:
        folder = services.registry.get(episode_id).run_folder
        if not folder.exists():
            raise NotKept(f"the results of episode {episode_id[:80]!r} are not kept any more")
    except UnknownEpisode:  # of this server's life; there may be one of an earlier
        found = await asyncio.to_thread(services.runs.find, episode_id)
        if found is None:
            raise
        return found
    return folder
