"""JSON-RPC as OpenEnv's MCP endpoints speak it. Terminal-Bench-2 has no tools to list, and says so."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

_INVALID_REQUEST, _METHOD_NOT_FOUND, _INTERNAL_ERROR = -32600, -32601, -32603


class JsonRpcRequest(BaseModel):
    """For the OpenAPI document."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"jsonrpc": "2.0", "id": 1, "method": "tools/list"}]})

    jsonrpc: Literal["2.0"] = "2.0"
    method: str
    id: int | str | None = None
    params: dict[str, Any] = {}


def answer_json_rpc(request: Any) -> dict[str, Any]:
    """The answer to one JSON-RPC 2.0 request."""
    if not isinstance(request, dict) or not isinstance(request.get("method"), str):
        return _error(None, _INVALID_REQUEST, "Invalid request: a JSON-RPC object with a method is needed")
    method, request_id = request["method"], request.get("id")
    if isinstance(request_id, float):  # JSON-RPC advises against it, and NaN is no JSON
        request_id = None
    if method in ("tools/list", "tools/call"):
        return _error(request_id, _INTERNAL_ERROR, "Environment does not support MCP: use reset and step")
    return _error(request_id, _METHOD_NOT_FOUND, f"Method not found: {method[:80]}")


def _error(request_id: Any, code: int, message: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": request_id, "error": {"code": code, "message": message}}
