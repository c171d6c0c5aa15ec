"""Whatever is sent, the answer is one of ours, never a failure, and nothing is left behind."""

from __future__ import annotations

import json
from typing import Any

import pytest
from client import JSON_TYPE, Reply
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_server import LiveServer

from looped_spec.serve.fields import CHAT_REFUSED, COMPLETION_REFUSED
from looped_spec.serve.protocol import ChatBody, CompletionBody

FUZZ = settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
PATHS = st.sampled_from(["/v1/completions", "/v1/chat/completions"])
ANY_TEXT = st.text(st.characters(codec=None), max_size=40)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(0, 40)
    | st.floats(allow_nan=True)
    | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_TEXT, inner, max_size=4),
    max_leaves=12,
)
NAMES = st.sampled_from(
    sorted(
        {*CompletionBody.model_fields, *ChatBody.model_fields, *COMPLETION_REFUSED}
        | set(CHAT_REFUSED)
    )
)


def assert_ours(reply: Reply) -> None:
    """The answer is a success or an error object that a client can act on."""
    assert reply.status < 500, reply.body
    if reply.status != 200:
        assert reply.error["message"]
    elif reply.headers["content-type"].startswith("text/event-stream"):
        assert reply.body.endswith(b"data: [DONE]\n\n")
        assert b'"error"' not in reply.body


@pytest.fixture
def fuzzed(server: LiveServer) -> LiveServer:
    return server


@FUZZ
@given(path=PATHS, body=st.binary(max_size=300))
def test_any_bytes(fuzzed: LiveServer, path: str, body: bytes) -> None:
    assert_ours(fuzzed.client.send("POST", path, body, **JSON_TYPE))


@FUZZ
@given(path=PATHS, document=JSON)
def test_any_json(fuzzed: LiveServer, path: str, document: Any) -> None:
    assert_ours(fuzzed.client.post(path, document))


@FUZZ
@given(path=PATHS, fields=st.dictionaries(NAMES | ANY_TEXT, JSON, max_size=3))
def test_a_good_request_with_any_fields_beside_it(
    fuzzed: LiveServer, path: str, fields: dict[str, Any]
) -> None:
    good: dict[str, Any] = {"max_tokens": 3}
    if "chat" in path:
        good["messages"] = [{"role": "user", "content": "hi"}]
    else:
        good["prompt"] = "hi"
    fields.pop("max_completion_tokens", None)
    assert_ours(fuzzed.client.post(path, {**fields, **good}))


@FUZZ
@given(
    prompt=ANY_TEXT
    | st.lists(st.integers(-5, 305), max_size=20)
    | st.lists(ANY_TEXT | st.lists(st.integers(0, 299), max_size=5), max_size=4),
    max_tokens=st.integers(1, 6),
    temperature=st.floats(0, 100) | st.sampled_from([0, 1e-30, 5e-324, 1e6]),
    top_p=st.floats(0, 1.1),
    top_k=st.integers(-2, 400),
    min_p=st.floats(0, 1),
    seed=st.integers(-(2**63) - 1, 2**63) | st.none(),
    stop=st.lists(ANY_TEXT, max_size=3),
    n=st.integers(0, 3),
    logprobs=st.none() | st.integers(-1, 25),
    stream=st.booleans(),
)
def test_any_parameters(fuzzed: LiveServer, **fields: Any) -> None:
    assert_ours(fuzzed.client.post("/v1/completions", fields))


@FUZZ
@given(
    messages=st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "system", "x"]) | ANY_TEXT, "content": ANY_TEXT}
        ),
        max_size=4,
    ),
    chat_template_kwargs=st.none() | st.dictionaries(ANY_TEXT, JSON, max_size=2),
    logprobs=st.none() | st.booleans(),
    top_logprobs=st.none() | st.integers(-1, 25),
    stream=st.booleans(),
)
def test_any_conversation(fuzzed: LiveServer, **fields: Any) -> None:
    assert_ours(fuzzed.client.post("/v1/chat/completions", {**fields, "max_tokens": 2}))


@settings(FUZZ, max_examples=40)
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"]),
    path=st.sampled_from(["/", "/health", "/v1", "/v1/models/x", "/metrics", "/page.js/", "//"])
    | st.text("abc/.%2eé", max_size=12).map(lambda text: "/" + text),
)
def test_any_path_and_method(fuzzed: LiveServer, method: str, path: str) -> None:
    from urllib.parse import quote

    reply = fuzzed.client.send(method, quote(path, safe="/%"))
    assert reply.status < 500
    if reply.status >= 400 and method != "HEAD":
        assert json.loads(reply.body)["error"]["message"]
