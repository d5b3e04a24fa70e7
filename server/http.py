"""The HTTP routes: OpenEnv's shape and episodes as resources, over the same episodes as /ws."""

import asyncio
import contextlib
import json
import uuid
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Literal, TypeVar

from fastapi import FastAPI, Path, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

from tbench2_env.models import Tbench2Action, Tbench2Observation, Tbench2State
from tbench2_env.server import diff, files, http_verdicts, problems
from tbench2_env.server.ending import End, EpisodeBusy, EpisodeEnded
from tbench2_env.server.episode import Episode
from tbench2_env.server.mcp import answer_json_rpc
from tbench2_env.server.problems import responses
from tbench2_env.server.registry import Ended, UnknownEpisode
from tbench2_env.server.services import Services
from tbench2_env.server.session import ResetRequest, find_task
from tbench2_env.server.wire import (
    CreateRequest,
    EpisodeCreated,
    EpisodeDiff,
    EpisodeId,
    EpisodeInfo,
    EpisodePage,
    EvaluateAnswer,
    ExecAnswer,
    ExecRequest,
    OperationAnswer,
    OperationStarted,
    StepAnswer,
    StepRequest,
    serialize,
)

DESCRIPTION = "Terminal-Bench-2 tasks, each episode in a copy-on-write worktree of its own, without Docker"
VERSION = "0.1.0"
_OPERATIONS_MAX = 64

T = TypeVar("T")
Wait = Annotated[int, Query(ge=0, le=1, description="0: answer 202 at once, with a handle to ask for the result")]
Keep = Annotated[int, Query(ge=0, le=1, description="1: an intermediate reward, the answer's done is false")]
FilePath = Annotated[str, Query(min_length=1, max_length=4096, description="Absolute, or relative to the workdir")]


class ClientGone(Exception):
    """The client hung up before it had its answer."""


def add_routes(app: FastAPI, services: Services) -> None:
    problems.install(app, services)
    app.add_exception_handler(ClientGone, _answer_nobody)
    _add_general(app)
    _add_monitoring(app, services)
    _add_openenv(app, services)
    _add_episodes(app, services)
    _add_actions(app, services)
    _add_files(app, services)
    _add_diff(app, services)
    http_verdicts.add_routes(app, services)
    problems.document(app)


def _add_general(app: FastAPI) -> None:
    @app.get("/health", tags=["Health"])
    async def health() -> dict[str, str]:
        """The process is alive."""
        return {"status": "healthy"}

    @app.get("/metadata", tags=["Environment Info"])
    async def metadata() -> dict[str, str]:
        return {"name": "tbench2_env", "description": DESCRIPTION, "version": VERSION}

    @app.get("/schema", tags=["Schema"])
    async def schema() -> dict[str, dict[str, Any]]:
        models: dict[str, type[BaseModel]] = {
            "action": Tbench2Action,
            "observation": Tbench2Observation,
            "state": Tbench2State,
        }
        return {name: model.model_json_schema() for name, model in models.items()}

    # Read by hand: whatever comes, the answer is JSON-RPC, never a validation error of another form.
    call = {"application/json": {"schema": {"$ref": "#/components/schemas/JsonRpcRequest"}}}

    @app.post("/mcp", tags=["MCP"], openapi_extra={"requestBody": {"content": call}})
    async def mcp(request: Request) -> dict[str, Any]:
        try:
            return answer_json_rpc(json.loads(await request.body()))
        except (ValueError, RecursionError):
            return answer_json_rpc(None)


def _add_monitoring(app: FastAPI, services: Services) -> None:
    @app.get("/ready", tags=["Health"], responses=responses(503))
    async def ready() -> dict[str, Any]:
        """This host isolates episodes, and how many more it takes now."""
        engine, pool = await services.engines.get(), services.pool
        return {"status": "ready", "rung": engine.spawner.rung.name, "active": pool.active, "slots": pool.maximum}

    @app.get("/metrics", tags=["Health"], response_class=Response)
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(await asyncio.to_thread(services.metrics.text), media_type="text/plain; version=0.0.4")


def _add_openenv(app: FastAPI, services: Services) -> None:
    @app.post("/reset", tags=["Environment Control"], responses=responses(404, 422, 429, 503))
    async def reset(request: Request, body: ResetRequest | None = None) -> StepAnswer:
        """Begin an episode; its id is observation.metadata.episode_id."""
        episode = await _unless_gone(request, _create(services, body or ResetRequest()))
        return _step_answer(episode.first_observation())

    @app.post("/step", tags=["Environment Control"], responses=responses(404, 409, 422, 503))
    async def step(request: Request, body: StepRequest) -> StepAnswer:
        """Carry out one action on an episode."""
        work = _live(services, body.episode_id).step(body.action, body.timeout_s, queue=False)
        return _step_answer(await _unless_gone(request, work))

    @app.get("/state", tags=["State Management"], responses=responses(404, 409, 422, 503))
    async def state(episode_id: Annotated[str, Query(min_length=1, max_length=255)]) -> Tbench2State:
        return _live(services, episode_id).state


def _add_episodes(app: FastAPI, services: Services) -> None:
    @app.post("/episodes", status_code=201, tags=["Episodes"], responses=responses(404, 422, 429, 503))
    async def create(request: Request, response: Response, body: CreateRequest) -> EpisodeCreated:
        """Begin an episode. It lives until it is deleted, idle for TB2_IDLE_TIMEOUT_S or over its time."""
        episode = await _unless_gone(request, _create(services, body))
        response.headers["location"] = f"/episodes/{episode.episode_id}"
        return EpisodeCreated(
            episode_id=episode.episode_id,
            task_id=episode.task_id,
            instruction=episode.instruction,
            info=episode.describe(),
        )

    @app.get("/episodes", tags=["Episodes"], responses=responses(422))
    async def list_episodes(
        task_id: Annotated[str | None, Query(max_length=255)] = None,
        state: Literal["live", "ended", "all"] = "live",
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        offset: Annotated[int, Query(ge=0, le=1_000_000)] = 0,
    ) -> EpisodePage:
        """Episodes, oldest first, those of WebSocket sessions too."""
        found: list[Episode | Ended] = []
        if state != "live":
            found += services.registry.ended()
        if state != "ended":
            found += services.registry.live()
        found = [episode for episode in found if task_id is None or episode.task_id == task_id]
        page = [_info(episode) for episode in found[offset : offset + limit]]
        next_offset = offset + limit if offset + limit < len(found) else None
        return EpisodePage(episodes=page, total=len(found), next_offset=next_offset)

    @app.get("/episodes/{episode_id}", tags=["Episodes"], responses=responses(404, 422))
    async def get(episode_id: EpisodeId) -> EpisodeInfo:
        return _info(services.registry.get(episode_id))

    @app.delete(
        "/episodes/{episode_id}",
        status_code=204,
        tags=["Episodes"],
        response_class=Response,
        responses=responses(404, 422),
    )
    async def delete(episode_id: EpisodeId) -> None:
        """End the episode, whatever it is doing. One that has ended already is no error."""
        episode = services.registry.get(episode_id)
        if isinstance(episode, Episode):
            await episode.discard(End.DELETED)


def _add_actions(app: FastAPI, services: Services) -> None:
    started: dict[int | str, dict[str, Any]] = {202: {"model": OperationStarted, "description": "Not waited for"}}

    @app.post(
        "/episodes/{episode_id}/exec", tags=["Episodes"], response_model=ExecAnswer,
        responses=responses(404, 409, 422, 503) | started,
    )  # fmt: skip
    async def execute(request: Request, episode_id: EpisodeId, body: ExecRequest, wait: Wait = 1) -> Any:
        """Run a command. A client that hangs up ends the command, not the episode."""
        episode = _live(services, episode_id)

        async def work() -> ExecAnswer:
            action = Tbench2Action(action_type="exec", command=body.command)
            observation = await episode.step(action, body.timeout_s, queue=False)
            episode.check_live()
            return _exec_answer(observation)

        return await _answer(request, episode, work, wait)

    @app.post(
        "/episodes/{episode_id}/evaluate", tags=["Episodes"], response_model=EvaluateAnswer,
        responses=responses(404, 409, 422, 503) | started,
    )  # fmt: skip
    async def evaluate(request: Request, episode_id: EpisodeId, wait: Wait = 1, keep: Keep = 0) -> Any:
        """Run the task's verifier. The episode can be used, and evaluated again, afterwards."""
        episode = _live(services, episode_id)

        async def work() -> EvaluateAnswer:
            action = Tbench2Action(action_type="evaluate", metadata={"keep": keep == 1})
            observation = await episode.step(action, queue=False)
            episode.check_live()
            return _evaluate_answer(observation)

        return await _answer(request, episode, work, wait)

    @app.get("/episodes/{episode_id}/operations/{handle}", tags=["Episodes"], responses=responses(404, 409, 422, 503))
    async def operation(episode_id: EpisodeId, handle: Annotated[str, Path(max_length=64)]) -> OperationAnswer:
        """What became of an exec or evaluate that was not waited for."""
        task = _live(services, episode_id).operations.get(handle)
        if task is None:
            raise UnknownEpisode(f"there is no operation {handle!r} of this episode")
        return OperationAnswer(handle=handle, done=task.done(), answer=task.result() if task.done() else None)


def _add_files(app: FastAPI, services: Services) -> None:
    binary = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    content = {"requestBody": {"required": True, "content": binary}}

    @app.put(
        "/episodes/{episode_id}/files", status_code=204, tags=["Episodes"], openapi_extra=content,
        response_class=Response,
        responses=responses(404, 409, 422, 503),
    )  # fmt: skip
    async def upload(request: Request, episode_id: EpisodeId, path: FilePath) -> None:
        """Write the raw body to a file of the episode, with the folders above it. Streamed, whatever its size."""
        episode = _live(services, episode_id)
        await files.receive(episode, files.check_path(path), request.stream())

    @app.get(
        "/episodes/{episode_id}/files", tags=["Episodes"], response_class=StreamingResponse,
        responses=responses(404, 409, 422, 503) | {200: {"content": binary}},
    )  # fmt: skip
    async def download(episode_id: EpisodeId, path: FilePath) -> StreamingResponse:
        """The content of a regular file of the episode. Streamed, whatever its size."""
        chunks = await files.send(_live(services, episode_id), files.check_path(path))
        return StreamingResponse(chunks, media_type="application/octet-stream")


def _add_diff(app: FastAPI, services: Services) -> None:
    binary = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}

    @app.get(
        "/episodes/{episode_id}/diff", tags=["Episodes"], response_model=EpisodeDiff,
        responses=responses(404, 409, 422, 503) | {200: {"content": binary}},
    )  # fmt: skip
    async def show_diff(request: Request, episode_id: EpisodeId, path: FilePath | None = None) -> Any:
        """What the live episode changed, or, with `path`, the content of one file that it added or changed."""
        episode = _live(services, episode_id)
        if path is None:
            return await diff.list_changes(episode)
        files.check_path(path)
        # Its bytes, since a name need not be UTF-8.
        raw_path = diff.path_of_query(request.scope["query_string"], episode.workdir)
        return StreamingResponse(await diff.read_changed(episode, raw_path), media_type="application/octet-stream")


# ---------------------------------------------------------------- helpers
async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nginx's "client closed request"; nobody reads it


async def _create(services: Services, body: ResetRequest) -> Episode:
    task = await find_task(services, body)
    slot = await services.pool.acquire()
    try:
        return await Episode.begin(services, task, body.episode_id, slot, own_slot=True)
    except BaseException:
        slot.release()
        raise


def _live(services: Services, episode_id: str) -> Episode:
    """Raises: UnknownEpisode, EpisodeEnded."""
    episode = services.registry.get(episode_id)
    if isinstance(episode, Ended):
        raise EpisodeEnded(episode.end, episode.message)
    episode.check_live()
    return episode


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client hangs up. Raises: ClientGone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _answer(request: Request, episode: Episode, work: Callable[[], Coroutine[Any, Any, Any]], wait: int) -> Any:
    if wait:
        return await _unless_gone(request, work())
    if episode.busy:
        raise EpisodeBusy(f"episode {episode.episode_id} is carrying out another action")
    handle = uuid.uuid4().hex
    for old in [name for name, task in episode.operations.items() if task.done()][: -_OPERATIONS_MAX or None]:
        del episode.operations[old]
    task = episode.operations[handle] = asyncio.ensure_future(work())
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # asked for by handle, if at all
    url = f"/episodes/{episode.episode_id}/operations/{handle}"
    return JSONResponse(OperationStarted(handle=handle, url=url).model_dump(), 202, {"location": url})


def _info(episode: Episode | Ended) -> EpisodeInfo:
    common: dict[str, Any] = {
        "episode_id": episode.episode_id,
        "task_id": episode.task_id,
        "begun": episode.begun,
        "reward": episode.reward,
    }
    if isinstance(episode, Ended):
        return EpisodeInfo(state="ended", busy=False, end=episode.end, message=episode.message, **common)
    return EpisodeInfo(state="live", busy=episode.busy, **common)


def _step_answer(observation: Tbench2Observation) -> StepAnswer:
    return StepAnswer(**serialize(observation))


def _exec_answer(observation: Tbench2Observation) -> ExecAnswer:
    return ExecAnswer(
        output=observation.output,
        success=observation.success,
        error=observation.error,
        exit_code=observation.info.get("exit_code"),
        timed_out=bool(observation.info.get("timed_out")),
    )


def _evaluate_answer(observation: Tbench2Observation) -> EvaluateAnswer:
    return EvaluateAnswer(
        reward=observation.reward,
        done=observation.done,
        output=observation.output,
        error=observation.error,
        info=observation.info,
    )
