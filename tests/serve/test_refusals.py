"""What is refused, by which status, and with which words."""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import shutil
import threading
from typing import Any

import pytest
from client import JSON_TYPE
from live_server import LiveServer, running
from pydantic import ValidationError
from starlette.requests import Request

from looped_spec.errors import CapacityError
from looped_spec.serve import bodies
from looped_spec.serve.bodies import parse_json_object
from looped_spec.serve.errors import ApiError
from looped_spec.serve.fields import CHAT_REFUSED, COMPLETION_REFUSED
from looped_spec.serve.protocol import ChatBody, CompletionBody, check_body

MESSAGES = [{"role": "user", "content": "the cat"}]
NESTED: Any = functools.reduce(lambda inner, _: [inner], range(900), [])


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"logprobs": 21}, "logprobs", "logprobs must be between 0 and 20, got 21"),
        ({"logprobs": 10**12}, "logprobs", "logprobs must be between 0 and 20"),
        ({"logprobs": -1}, "logprobs", "greater than or equal to 0"),
        ({"logprobs": True}, "logprobs", "valid integer"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "'prompt_logprobs' is not supported"),
        ({"echo": True}, "echo", "'echo' is not supported: the prompt is not repeated"),
        ({"suffix": "end"}, "suffix", "'suffix' is not supported"),
        ({"best_of": 2}, "best_of", "'best_of' is not supported"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "without penalties"),
        ({"logit_bias": {"3": 1}}, "logit_bias", "logits are not changed"),
        ({"max_token": 3}, "max_token", "unknown field 'max_token' (did you mean 'max_tokens'?)"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": "9"}, "max_tokens", "valid integer"),
        ({"max_tokens": True}, "max_tokens", "valid integer"),
        ({"max_tokens": 2**40}, "max_tokens", "less than or equal to"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"top_p": 0}, "top_p", "top_p must be in (0, 1], got 0"),
        ({"top_p": 1.5}, "top_p", "top_p must be in (0, 1]"),
        ({"min_p": 2}, "min_p", "min_p must be in [0, 1]"),
        ({"top_k": -2}, "top_k", "top_k must be at least -1"),
        ({"seed": 2**63}, "seed", "seed must be between"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 17}, "n", "n must be between 1 and 16, got 17"),
        ({"stop": ["a"] * 17}, "stop", "stop may have 16 texts, got 17"),
        ({"stop": ""}, "stop", "each of 1 to 256 characters"),
        ({"stop": "x" * 257}, "stop", "each of 1 to 256 characters"),
        ({"stop": [3]}, "stop", "a text or a list of texts"),
        ({"stop": "a\ud800"}, "stop", "half of a surrogate pair"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "between 0 and 299, got -1"),
        ({"stop_token_ids": [2, 300]}, "stop_token_ids", "between 0 and 299, got 300"),
        ({"prompt": ["a"] * 200, "n": 16}, "n", "3200 answers are asked for at once"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "belongs to stream"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "is not supported"),
        ({"prompt": ""}, "prompt", "prompt is empty"),
        ({"prompt": []}, "prompt", "must be a text, a list of token ids"),
        ({"prompt": [[]]}, "prompt", "must be a text, a list of token ids"),
        ({"prompt": [1, "a"]}, "prompt", "must be a text, a list of token ids"),
        ({"prompt": [300]}, "prompt", "token ids must be between 0 and 299, got 300"),
        ({"prompt": [-1]}, "prompt", "got -1"),
        ({"prompt": [10**30]}, "prompt", "got a larger one"),
        ({"prompt": None}, "prompt", "must be a text"),
        ({"prompt": "\ud800"}, "prompt", "half of a surrogate pair"),
        ({"prompt": [5] * 512}, "prompt", "a prompt may have 511 tokens (max_model_len"),
        ({"prompt": "a b " * 9000}, "prompt", "characters are more than any"),
        ({"model": "gpt-4"}, "model", "there is no model 'gpt-4' here, only 'tiny'"),
        ({"model": "../../etc/passwd"}, "model", "there is no model"),
        ({"model": 3}, "model", "valid string"),
        ({"user": 3}, "user", "valid string"),
    ],
)
def test_a_completion_that_cannot_be_given_is_refused_by_the_fields_name(
    server: LiveServer, fields: dict[str, Any], param: str, text: str
) -> None:
    reply = server.client.complete(**{"prompt": "the", "max_tokens": 1, **fields})
    assert reply.status == (404 if text.startswith("there is no model") else 400)
    assert text in reply.error["message"]
    assert reply.error["param"] == param
    assert reply.error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"logprobs": 1}, "logprobs", "valid boolean"),
        ({"top_logprobs": 3}, "top_logprobs", "top_logprobs needs logprobs: true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20, got 21"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "greater than or equal to 0"),
        ({"tools": [{"type": "function"}]}, "tools", "calls of tools are not parsed"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not constrained"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": "hi"}, "messages", "valid list"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is required"),
        ({"messages": [{"role": "user", "content": "a", "x": 1}]}, "messages[0].x", "supported"),
        ({"messages": [{"role": "robot", "content": "a"}]}, None, "no role robot"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
            "parts of type 'text' with a text, not 'image_url'",
        ),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "'tokenize'"),
        ({"chat_template_kwargs": {"tools": [{}]}}, "chat_template_kwargs", "'tools'"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "not set 'chat"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "not set 'self'"),
        ({"chat_template_kwargs": {"shout": NESTED}}, None, "chat_template_kwargs is nested too"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs", "valid dictionary"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "two names of one limit"),
    ],
)
def test_a_chat_that_cannot_be_given_is_refused_by_the_fields_name(
    server: LiveServer, fields: dict[str, Any], param: str | None, text: str
) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1, **fields}
    if "max_completion_tokens" not in fields:
        body = {"max_completion_tokens": 1, **body}
    reply = server.client.post("/v1/chat/completions", body)
    assert reply.status == 400
    assert text in reply.error["message"]
    assert reply.error["param"] == param


@pytest.mark.parametrize(
    ("path", "known", "refused"),
    [
        ("/v1/completions", CompletionBody, COMPLETION_REFUSED),
        ("/v1/chat/completions", ChatBody, CHAT_REFUSED),
    ],
)
def test_a_refused_field_with_a_value_that_means_nothing_is_let_through(
    server: LiveServer, path: str, known: Any, refused: Any
) -> None:
    base = {"prompt": "the"} if "chat" not in path else {"messages": MESSAGES}
    nothing = {name: None for name in refused} | {
        name: None for name in known.model_fields if name not in base
    }
    assert server.client.post(path, {**base, **nothing, "max_tokens": 1}).status == 200
    neutral = {name: values[0] for name, (values, _) in refused.items() if values}
    assert server.client.post(path, {**base, **neutral, "max_tokens": 1}).status == 200
    assert not set(refused) & set(known.model_fields)


def test_true_does_not_stand_for_one(server: LiveServer) -> None:
    assert server.client.complete("the", max_tokens=1, repetition_penalty=True).status == 400
    assert server.client.complete("the", max_tokens=1, repetition_penalty=1.0).status == 200


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'{"prompt": "\xff"}', "not valid UTF-8"),
        (b'{"prompt": "a", "prompt": "b"}', "a name occurs twice"),
        (b'{"temperature": NaN}', "NaN is no number"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "a number has thousands of digits"),
        (b'{"user": "' + b"9" * 5000 + b'", "x": 1, "x": 2}', "a name occurs twice"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(
    server: LiveServer, body: bytes, text: str
) -> None:
    reply = server.client.send("POST", "/v1/completions", body, **JSON_TYPE)
    assert reply.status == 400
    assert text in reply.error["message"]


def test_another_media_type_is_refused(server: LiveServer) -> None:
    """A page of another site may send this one without asking, but not JSON."""
    reply = server.client.send("POST", "/v1/completions", b"{}", Content_Type="text/plain")
    assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", "/docs", 404, "not_found"),
        ("GET", "/page.js/../../secret", 404, "not_found"),
        ("GET", "/%2e%2e/%2e%2e/etc/passwd", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
    ],
)
def test_a_wrong_path_or_method_is_told_as_an_openai_error(
    server: LiveServer, method: str, path: str, status: int, code: str
) -> None:
    reply = server.client.send(method, path)
    assert (reply.status, reply.error["code"]) == (status, code)


def test_a_body_over_the_limit_is_refused_without_being_read(server: LiveServer) -> None:
    limit = server.options.max_body_bytes
    with server.connect() as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {limit + 1}\r\n\r\n".encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")
    with server.connect() as connection:
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
        answer = b""
        for _ in range(limit // 65536 + 1):
            connection.sendall(chunk)
        while f"at most {limit} bytes" not in answer.decode():
            part = connection.recv(65536)
            assert part, answer
            answer += part
        assert answer.startswith(b"HTTP/1.1 413 ")


def test_the_first_of_very_many_wrong_messages_is_the_only_one_that_is_looked_at() -> None:
    with pytest.raises(ApiError, match=r"^messages\[0\]: ") as caught:
        check_body(ChatBody, {"messages": [1] * 1000})
    assert isinstance(caught.value.__cause__, ValidationError)
    assert caught.value.__cause__.error_count() == 1


class Unread(list[Any]):
    """A list that may be measured, but not gone through."""

    def __iter__(self) -> Any:
        raise AssertionError("somebody looks at the items")


@pytest.mark.parametrize(
    ("kind", "name", "items"),
    [
        (ChatBody, "messages", MESSAGES * 4),
        (CompletionBody, "prompt", ["a"] * 4),
        (CompletionBody, "prompt", [[1]] * 4),
        (CompletionBody, "stop", ["a"] * 4),
    ],
)
def test_a_list_that_is_too_long_is_refused_without_a_look_at_its_items(
    kind: type[Any], name: str, items: list[Any]
) -> None:
    needed = {"prompt": "a"} if kind is CompletionBody else {"messages": MESSAGES}
    with pytest.raises(ApiError, match=f"^{name} may have 3 [a-z]+, got 4$") as caught:
        check_body(kind, {**needed, name: Unread(items)}, {name: 3})
    assert (caught.value.status, caught.value.param) == (400, name)
    assert check_body(kind, {**needed, name: items}, {name: 4})


def test_one_prompt_of_many_token_ids_is_no_list_of_prompts() -> None:
    assert check_body(CompletionBody, {"prompt": [1] * 9}, {"prompt": 3}).prompt == [[1] * 9]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True, "stream_options": {}}, "stream_options.x0"),
        ({"messages": [MESSAGES[0], {"content": "a", "role": "user"}]}, "messages[1].x0"),
    ],
)
def test_of_very_many_unknown_names_inside_a_field_the_first_alone_is_told(
    fields: dict[str, Any], param: str
) -> None:
    body = copy.deepcopy({"messages": MESSAGES, **fields})
    inner = body.get("stream_options", body["messages"][-1])
    inner.update({f"x{i}": 0 for i in range(1000)})
    with pytest.raises(ApiError, match=r"x0: is not supported$") as caught:
        check_body(ChatBody, body)
    assert caught.value.param == param
    assert isinstance(caught.value.__cause__, ValidationError)
    assert caught.value.__cause__.error_count() == 1


@pytest.mark.parametrize(("size", "is_here"), [(100, True), (200_000, False)])
def test_a_large_body_is_parsed_beside_the_event_loop(
    size: int, is_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def parse(data: bytes) -> dict[str, Any]:
        threads.append(threading.get_ident())
        return parse_json_object(data)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps({"prompt": "a" * size}).encode()}

    monkeypatch.setattr(bodies, "parse_json_object", parse)
    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
    document = asyncio.run(bodies.read_json_object(Request(scope, receive), 2**20, 30.0))
    assert len(document["prompt"]) == size
    assert (threads == [threading.get_ident()]) == is_here


def test_what_is_no_http_is_refused_in_plain_text(server: LiveServer) -> None:
    with server.connect() as connection:
        connection.sendall(b"what is this?\r\n\r\n")
        answer = b""
        while part := connection.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 400 ") and b"text/plain" in answer
    assert b"error" not in answer


def test_an_unknown_field_of_any_characters_is_named_and_cut(server: LiveServer) -> None:
    for name in ("\ud800", "ä" * 500, "\n", '"'):
        reply = server.client.complete("the", **{name: 1})
        assert reply.status == 400
        assert reply.error["message"].startswith("unknown field '")
        assert len(reply.error["message"]) < 200


def test_every_answer_has_an_id_and_a_good_one_of_the_client_is_kept(server: LiveServer) -> None:
    ids = [server.client.get(path).headers["x-request-id"] for path in ("/health", "/no", "/")]
    assert len(set(ids)) == 3
    kept = server.client.get("/health", X_Request_Id="run-7:a.b/c").headers["x-request-id"]
    assert kept == "run-7:a.b/c"
    for bad in ("x" * 129, "a b", "<script>"):
        assert server.client.get("/health", X_Request_Id=bad).headers["x-request-id"] != bad


def test_limits_of_the_server_are_options(model: Any) -> None:
    limits = {"max_n": 1, "max_stop_strings": 0, "max_prompt_tokens": 3, "max_messages": 2}
    limits |= {"max_body_bytes": 4096}
    with running(model, **limits) as server:
        client = server.client
        assert "between 1 and 1" in client.complete("a", n=2).error["message"]
        assert "may have 0 texts" in client.complete("a", stop="b").error["message"]
        error = client.post("/v1/chat/completions", {"messages": MESSAGES * 3}).error
        assert (error["message"], error["param"]) == (
            "messages may have 2 messages, got 3",
            "messages",
        )
        many = ["a"] * (server.front.num_places + 1)
        assert client.complete(many).error["param"] == "prompt"
        assert client.complete([5, 5, 5], max_tokens=1).status == 200
        error = client.complete([5, 5, 5, 5]).error
        assert error["message"] == "a prompt may have 3 tokens (max_prompt_tokens): got 4"
        assert error["code"] == "context_length_exceeded"
        assert client.complete("a" * 4096).status == 413


def test_memory_limits_the_length_of_a_prompt(model: Any) -> None:
    with running(model, {"kv_cache_memory_bytes": 40_000}) as server:
        most = server.llm.engine.scheduler.allocator.num_blocks * 8
        assert most < 511
        reply = server.client.complete([5] * most, max_tokens=100)
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
        assert server.client.complete([5] * (most - 1), max_tokens=100).status == 200
        server.assert_idle()


def test_what_the_engine_refuses_is_refused_with_its_words(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(request: object) -> None:
        raise CapacityError("it can never fit")

    monkeypatch.setattr(server.llm.engine.scheduler, "check", refuse)
    for fields in ({}, {"stream": True}, {"n": 2}):
        reply = server.client.complete("the", **fields)
        assert (reply.status, reply.error["message"]) == (400, "it can never fit")


def test_a_model_without_a_tokenizer_takes_ids_and_gives_ids(model: Any, tmp_path: Any) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("tokenizer*"))
    with running(folder) as server:
        client = server.client
        for reply in (client.complete("the"), client.chat("the")):
            assert reply.status == 400
            assert "this model has no tokenizer" in reply.error["message"]
        assert client.complete([5], stop="a").error["param"] == "stop"
        reply = client.complete([5, 6], max_tokens=4, seed=1, return_token_ids=True)
        assert reply.text == ""
        choice = reply.json["choices"][0]
        assert len(choice["token_ids"]) == 4 and choice["prompt_token_ids"] == [5, 6]


def test_a_model_without_a_chat_template_refuses_chats(model: Any, tmp_path: Any) -> None:
    folder = tmp_path / "plain"
    shutil.copytree(model, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with running(folder) as server:
        reply = server.client.chat("the")
        assert (reply.status, server.client.complete("the").status) == (400, 200)
        assert "no chat template" in reply.error["message"]
