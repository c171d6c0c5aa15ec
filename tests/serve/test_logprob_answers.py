"""Log probabilities over HTTP, in both forms, streamed and whole, are those of the engine."""

from __future__ import annotations

import math
from typing import Any

import pytest
from live_server import LiveServer, running

from looped_spec.sampling_params import SamplingParams

PROMPT = "the cat sat"
FIELDS: dict[str, Any] = {"max_tokens": 17, "seed": 5, "temperature": 0.8}


@pytest.fixture(scope="module")
def offline(shared: LiveServer, model: Any) -> Any:
    """What the library gives by plain decoding."""
    from looped_spec.runtime.llm import LLM

    llm = LLM(model, num_speculative_tokens=0, kv_cache_memory_bytes=2**20)
    params = SamplingParams(**FIELDS, logprobs=3)
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    return llm.get_tokenizer(), output.outputs[0]


def test_a_completion_has_one_entry_for_each_token(server: LiveServer, offline: Any) -> None:
    tokenizer, expected = offline
    reply = server.client.complete(PROMPT, logprobs=3, **FIELDS).json
    (choice,) = reply["choices"]
    told = choice["logprobs"]
    assert choice["text"] == expected.text
    assert reply["usage"]["completion_tokens"] == len(told["tokens"]) == len(expected.logprobs)
    values = [one.logprob for one in expected.logprobs]
    assert told["token_logprobs"] == pytest.approx(values, abs=1e-4)
    texts = [tokenizer.decode([one.token_id], False) for one in expected.logprobs]
    assert told["tokens"] == texts
    assert told["text_offset"] == [len("".join(texts[:i])) for i in range(len(texts))]
    for one, by_text in zip(expected.logprobs, told["top_logprobs"], strict=True):
        assert tokenizer.decode([one.token_id], False) in by_text
        best = tokenizer.decode([one.top[0][0]], False)
        assert by_text[best] == max(by_text.values())
        assert 1 <= len(by_text) <= 4


def test_a_chat_has_text_bytes_and_the_likeliest_tokens(server: LiveServer) -> None:
    reply = server.client.chat(PROMPT, logprobs=True, top_logprobs=2, **FIELDS).json
    content = reply["choices"][0]["logprobs"]["content"]
    assert len(content) == reply["usage"]["completion_tokens"]
    for entry in content:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == 2
        first, second = (one["logprob"] for one in entry["top_logprobs"])
        assert 0 >= first >= second and first >= entry["logprob"] - 1e-6
        for one in (entry, *entry["top_logprobs"]):
            if one["bytes"] is not None:
                assert bytes(one["bytes"]).decode() == one["token"]
    alone = server.client.chat(PROMPT, logprobs=True, **FIELDS).json
    assert all(not one["top_logprobs"] for one in alone["choices"][0]["logprobs"]["content"])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_tells_the_same_as_the_whole_answer(server: LiveServer, path: str) -> None:
    if path.endswith("chat/completions"):
        fields = {"messages": [{"role": "user", "content": PROMPT}], "logprobs": True}
        fields["top_logprobs"] = 2
    else:
        fields = {"prompt": PROMPT, "logprobs": 2}
    whole = server.client.post(path, {**fields, **FIELDS, "n": 2}).json
    joined: list[dict[str, list[Any]]] = [{}, {}]
    for document in server.client.stream(path, **fields, **FIELDS, n=2):
        for choice in document["choices"]:
            lists = choice["logprobs"]
            assert all(len(items) == choice["num_tokens"] for items in lists.values())
            for key, items in lists.items():
                joined[choice["index"]].setdefault(key, []).extend(items)
    for choice, told in zip(whole["choices"], joined, strict=True):
        assert _rounded(told) == _rounded(choice["logprobs"])


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        assert math.isfinite(value)
        return round(value, 3)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def test_without_the_field_there_are_none(server: LiveServer) -> None:
    for fields in ({}, {"logprobs": None}, {"logprobs": False}):
        assert server.client.complete(PROMPT, **fields).json["choices"][0]["logprobs"] is None
        assert server.client.chat(PROMPT, **fields).json["choices"][0]["logprobs"] is None
    assert server.client.complete(PROMPT, logprobs=0).json["choices"][0]["logprobs"]["tokens"]


def test_the_limit_is_an_option(model: Any) -> None:
    with running(model, max_logprobs=1) as own:
        assert own.client.complete("the", max_tokens=2, logprobs=1).status == 200
        reply = own.client.complete("the", max_tokens=2, logprobs=2)
        assert reply.status == 400 and "between 0 and 1" in reply.error["message"]
