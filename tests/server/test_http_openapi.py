"""The OpenAPI document: valid, with examples and every error, and what `openenv validate` wants."""

from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema_rs
import pytest

PROBLEM = "application/problem+json"
OPEN = {"/health"}
#: Statuses besides success that each route can answer with, whatever it is asked.
EVERYWHERE = {"401", "414"}
ERRORS = {
    ("get", "/ready"): {"503"},
    ("post", "/reset"): {"404", "413", "422", "429", "503"},
    ("post", "/step"): {"404", "409", "413", "422"},
    ("get", "/state"): {"404", "409", "422"},
    ("post", "/episodes"): {"404", "413", "422", "429", "503"},
    ("get", "/episodes"): {"422"},
    ("get", "/episodes/{episode_id}"): {"404", "422"},
    ("delete", "/episodes/{episode_id}"): {"404", "422"},
    ("post", "/episodes/{episode_id}/exec"): {"404", "409", "413", "422", "503"},
    ("post", "/episodes/{episode_id}/evaluate"): {"404", "409", "422", "503"},
    ("get", "/episodes/{episode_id}/verdict"): {"404", "422"},
    ("get", "/episodes/{episode_id}/verifier/log"): {"404", "422"},
    ("get", "/episodes/{episode_id}/verifier/ctrf"): {"404", "422"},
    ("get", "/episodes/{episode_id}/operations/{handle}"): {"404", "409", "422", "503"},
    ("put", "/episodes/{episode_id}/files"): {"404", "409", "422", "503"},
    ("get", "/episodes/{episode_id}/files"): {"404", "409", "422", "503"},
    ("get", "/episodes/{episode_id}/diff"): {"404", "409", "422", "503"},
    ("get", "/metadata"): set(),
    ("get", "/schema"): set(),
    ("get", "/metrics"): set(),
    ("post", "/mcp"): {"413"},
}
HTTP_METHODS = {"get", "put", "post", "delete", "patch", "head", "options", "trace"}


@pytest.fixture
def document(client: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/openapi.json").json()
    return found


def _operations(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (method, path): operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if method in HTTP_METHODS
    }


def _refs(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "$ref":
                yield inner
            else:
                yield from _refs(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _refs(inner)


def test_the_document_is_valid(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    assert (document["info"]["title"], bool(document["info"]["version"])) == ("tbench2_env", True)
    for reference in _refs(document):
        found: Any = document
        for part in reference.removeprefix("#/").split("/"):
            found = found[part]
        assert found
    for schema in document["components"]["schemas"].values():
        jsonschema_rs.meta.validate(schema)
    ids = [operation["operationId"] for operation in _operations(document).values()]
    assert len(ids) == len(set(ids))
    for (_, path), operation in _operations(document).items():
        wanted = {part[1:-1] for part in path.split("/") if part.startswith("{")}
        declared = {one["name"] for one in operation.get("parameters", []) if one["in"] == "path"}
        assert declared == wanted, path


def test_every_route_is_documented_with_its_errors(document: dict[str, Any]) -> None:
    operations = _operations(document)
    assert set(operations) == {*ERRORS, ("get", "/health")}
    missing = {
        f"{method} {path}": sorted(wanted)
        for (method, path), errors in ERRORS.items()
        if (wanted := (errors | EVERYWHERE) - set(operations[method, path]["responses"]))
    }
    assert not missing


def test_errors_are_documented_as_problems(document: dict[str, Any]) -> None:
    for (method, path), operation in _operations(document).items():
        for status, response in operation["responses"].items():
            if status >= "4":
                content = response["content"]
                assert list(content) == [PROBLEM], f"{method} {path} {status}"
                assert content[PROBLEM]["schema"] == {"$ref": "#/components/schemas/Problem"}
    problem = document["components"]["schemas"]["Problem"]
    assert {"title", "status", "detail", "code"} <= set(problem["required"])


def test_bodies_and_answers_are_typed_and_have_examples(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for (method, path), operation in _operations(document).items():
        for content_type, body in operation.get("requestBody", {}).get("content", {}).items():
            if content_type == "application/json":
                names = [reference.rpartition("/")[2] for reference in _refs(body)]
                assert names, f"{method} {path} takes an untyped body"
                assert any(schemas[name].get("examples") for name in names), f"{method} {path} has no example"
        if "episodes" in path or path in ("/reset", "/step", "/state"):
            for status, response in operation["responses"].items():
                for content_type, content in response.get("content", {}).items():
                    if status < "4" and content_type == "application/json":
                        assert list(_refs(content)), f"{method} {path} {status} has an untyped answer"
    assert schemas["Problem"]["examples"]


def test_the_examples_are_examples(document: dict[str, Any]) -> None:
    """Each fits its schema."""
    checked = 0
    for name, schema in document["components"]["schemas"].items():
        for example in schema.get("examples", []):
            whole = {**schema, "components": document["components"]}
            jsonschema_rs.validate(whole, example)
            checked += 1
        assert schema.get("title", name)
    assert checked >= 4


def test_files_are_documented_as_binary(document: dict[str, Any]) -> None:
    files = document["paths"]["/episodes/{episode_id}/files"]
    assert list(files["put"]["requestBody"]["content"]) == ["application/octet-stream"]
    assert list(files["get"]["responses"]["200"]["content"]) == ["application/octet-stream"]
    diff = document["paths"]["/episodes/{episode_id}/diff"]["get"]["responses"]["200"]["content"]
    assert sorted(diff) == ["application/json", "application/octet-stream"]


def test_the_202_is_documented(document: dict[str, Any]) -> None:
    for route in ("exec", "evaluate"):
        answers = document["paths"][f"/episodes/{{episode_id}}/{route}"]["post"]["responses"]
        content = answers["202"]["content"]["application/json"]
        assert content["schema"]["$ref"].endswith("OperationStarted")


def test_ready(client: httpx.Client) -> None:
    ready = client.get("/ready").json()
    assert (ready["status"], ready["slots"], ready["active"]) == ("ready", 64, 0)
