"""Errors as application/problem+json (RFC 9457) with a `code`, the same words as on the wire."""

import json
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException

from tbench2_env.isolation.process import SandboxError
from tbench2_env.server.auth import OPEN_PATHS
from tbench2_env.server.diff import NotChanged
from tbench2_env.server.ending import EpisodeBusy, EpisodeEnded
from tbench2_env.server.mcp import JsonRpcRequest
from tbench2_env.server.pool import CapacityReached
from tbench2_env.server.registry import NotKept, UnknownEpisode
from tbench2_env.server.services import Services
from tbench2_env.server.session import BadRequest
from tbench2_env.server.taskconfig import TaskError
from tbench2_env.server.tasks import UnknownTask

log = structlog.get_logger()

#: Seconds after which a client that found no free slot may ask again.
RETRY_AFTER_S = 2
_MEDIA_TYPE = "application/problem+json"


class Problem(BaseModel):
    """Body of every error answer."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "examples": [
                {
                    "type": "about:blank", "title": "Not Found", "status": 404, "code": "UNKNOWN_EPISODE",
                    "detail": "there is no episode 'x': POST /episodes begins one",
                }
            ]
        },
    )  # fmt: skip

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    code: str


#: Exception -> status and code. The first class that matches decides.
_KINDS: tuple[tuple[type[Exception], int, str], ...] = (
    (UnknownEpisode, 404, "UNKNOWN_EPISODE"),
    (NotKept, 404, "NOT_KEPT"),
    (UnknownTask, 404, "UNKNOWN_TASK"),
    (NotChanged, 404, "NOT_CHANGED"),
    (EpisodeEnded, 409, "EPISODE_ENDED"),
    (EpisodeBusy, 409, "EPISODE_BUSY"),
    (BadRequest, 422, "VALIDATION_ERROR"),
    (RequestValidationError, 422, "VALIDATION_ERROR"),
    (CapacityReached, 429, "CAPACITY_REACHED"),
    (TaskError, 422, "TASK_UNUSABLE"),
    (SandboxError, 503, "SANDBOX_FAILED"),
)
_TITLES = {
    401: "Unauthorized",
    404: "Not Found",
    409: "Conflict",
    413: "Content Too Large",
    414: "URI Too Long",
    422: "Unprocessable Content",
    429: "Too Many Requests",
    503: "Service Unavailable",
}


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI entries for these error statuses."""
    content = {_MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {status: {"description": _TITLES[status], "content": content} for status in statuses}


def document(app: FastAPI) -> None:
    """Complete the OpenAPI document: the Problem schema, and the errors that any route may answer with."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = make()
            for model in (Problem, JsonRpcRequest):
                schema["components"]["schemas"][model.__name__] = model.model_json_schema()
            for path, operations in schema["paths"].items():
                for operation in operations.values():
                    for status, entry in _anywhere(path, operation).items():
                        operation["responses"].setdefault(str(status), entry)
        return app.openapi_schema or {}

    app.openapi = openapi  # type: ignore[method-assign]


def _anywhere(path: str, operation: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    statuses = [414] if path in OPEN_PATHS else [401, 414]
    return responses(*statuses, *([413] if "requestBody" in operation else []))


def install(app: FastAPI, services: Services) -> None:
    """Answer every exception with a problem."""

    async def known(request: Request, error: Exception) -> JSONResponse:
        status, code = next((status, code) for kind, status, code in _KINDS if isinstance(error, kind))
        extra: dict[str, Any] = {}
        headers = {}
        if isinstance(error, CapacityReached):
            services.metrics.rejections.labels("capacity").inc()
            extra = {"active_sessions": error.active, "max_sessions": error.maximum}
            headers["retry-after"] = str(RETRY_AFTER_S)
        return answer(status, code, _detail(error), headers, **extra)

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if error.status_code == 400:  # FastAPI's answer to a body that is not UTF-8
            return answer(422, "VALIDATION_ERROR", str(error.detail), {})
        return answer(error.status_code, "HTTP_ERROR", str(error.detail), dict(error.headers or {}))

    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        log.exception("unexpected error", path=request.url.path, exc_info=error)
        return answer(500, "EXECUTION_ERROR", f"{type(error).__name__}: {error}", {})

    for kind, _, _ in _KINDS:
        app.add_exception_handler(kind, known)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unexpected)


def answer(status: int, code: str, detail: str, headers: dict[str, str], **extra: Any) -> JSONResponse:
    title = _TITLES.get(status, "Error")
    problem = Problem(title=title, status=status, detail=detail, code=code, **extra)
    return AsciiJson(problem.model_dump(), status, headers, _MEDIA_TYPE)


class AsciiJson(JSONResponse):
    """JSON that can say everything a client may send, lone surrogates too."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False).encode()


def _detail(error: Exception) -> str:
    if isinstance(error, RequestValidationError):
        return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
    return str(error)
