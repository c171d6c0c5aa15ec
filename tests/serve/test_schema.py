"""The schema of the bodies says what the server takes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from live_server import LiveServer

from looped_spec.serve.errors import ApiError
from looped_spec.serve.protocol import ChatBody, CompletionBody, GenerationBody, check_body

PART = {"type": "text", "text": "a"}
TYPES: dict[str, type | tuple[type, ...]] = {
    "array": list,
    "boolean": bool,
    "integer": int,
    "null": type(None),
    "number": (int, float),
    "object": dict,
    "string": str,
}


def fits(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Whether a value is as a JSON schema says, by the words that ours use for its form."""
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rsplit("/", 1)[1]]
    if "anyOf" in schema:
        return any(fits(value, one, root) for one in schema["anyOf"])
    if "const" in schema:
        return bool(value == schema["const"])
    if not isinstance(value, TYPES[schema["type"]]):
        return False
    if isinstance(value, list):
        return all(fits(one, schema["items"], root) for one in value)
    if isinstance(value, dict) and "properties" in schema:
        known = schema["properties"]
        is_whole = set(schema.get("required", ())) <= set(value) <= set(known)
        return is_whole and all(fits(one, known[name], root) for name, one in value.items())
    return True


FORMS: list[tuple[type[GenerationBody], dict[str, Any], bool]] = [
    *((CompletionBody, {"prompt": one}, True) for one in ("a", [1, 2], ["a", "b"], [[1], [2]])),
    *((CompletionBody, {"prompt": one}, False) for one in (3, [1.5], {"a": 1}, [None])),
    *((CompletionBody, {"prompt": "a", "stop": one}, True) for one in ("x", ["x"], None)),
    (CompletionBody, {"prompt": "a", "stop": 3}, False),
    (ChatBody, {"messages": [{"role": "user", "content": "a"}]}, True),
    (ChatBody, {"messages": [{"role": "user", "content": [PART, PART]}]}, True),
    (ChatBody, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, False),
    (ChatBody, {"messages": [{"role": "user", "content": 3}]}, False),
]


@pytest.mark.parametrize(("kind", "body", "is_good"), FORMS)
def test_the_schema_takes_what_the_server_takes(
    kind: type[GenerationBody], body: dict[str, Any], is_good: bool, server: LiveServer
) -> None:
    path = "/v1/completions" if kind is CompletionBody else "/v1/chat/completions"
    schema = server.client.get("/openapi.json").json
    described = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    assert fits(body, described["schema"], described["schema"]) == is_good
    if is_good:
        check_body(kind, body)
    else:
        with pytest.raises(ApiError):
            check_body(kind, body)


def test_the_schema_describes_the_bodies(server: LiveServer) -> None:
    schema = server.client.get("/openapi.json").json
    for path, field in (("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")):
        body = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert field in body["schema"]["properties"], json.dumps(body)[:200]
