"""The HTTP routes beside /ws: health, metadata, schemas, MCP."""

import json
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel

from tbench2_env.models import Tbench2Action, Tbench2Observation, Tbench2State
from tbench2_env.server.mcp import answer_json_rpc

DESCRIPTION = "Terminal-Bench-2 tasks, each episode in a copy-on-write worktree of its own, without Docker"
VERSION = "0.1.0"


def add_routes(app: FastAPI) -> None:
    @app.get("/health", tags=["Health"])
    async def health() -> dict[str, str]:
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

    @app.post("/mcp", tags=["MCP"])
    async def mcp(request: Request) -> dict[str, Any]:
        try:
            return answer_json_rpc(json.loads(await request.body()))
        except (ValueError, RecursionError):
            return answer_json_rpc(None)
