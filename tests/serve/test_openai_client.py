"""OpenAI's own client does not notice that this is another server."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, running
from processes import PATIENCE_SECONDS

openai = pytest.importorskip("openai", reason="the openai client is not installed")

KEY = "the-key"
MESSAGES: list[Any] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "the cat sat on"},
]


@pytest.fixture(scope="module")
def locked(model: Path) -> Iterator[LiveServer]:
    with running(model, api_key=KEY, max_queued_requests=64) as server:
        yield server


@pytest.fixture(scope="module")
def client(locked: LiveServer) -> Iterator[Any]:
    base = f"http://127.0.0.1:{locked.port}/v1"
    with openai.OpenAI(base_url=base, api_key=KEY, max_retries=0, timeout=PATIENCE_SECONDS) as made:
        yield made


def test_models_are_listed(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").model_dump()["max_model_len"] == 512
    with pytest.raises(openai.NotFoundError, match="there is no model 'a/b' here"):
        client.models.retrieve("a/b")


def test_a_conversation_is_the_same_streamed_and_whole_and_by_the_plain_reader(
    client: Any, locked: LiveServer
) -> None:
    for fields in ({"temperature": 0}, {"seed": 4}, {"seed": 5, "stop": ["e"], "top_p": 0.9}):
        given = {"messages": MESSAGES, "max_tokens": 24, **fields}
        whole = client.chat.completions.create(model="tiny", **given)
        stream = client.chat.completions.create(
            model="tiny", stream=True, stream_options={"include_usage": True}, **given
        )
        chunks = list(stream)
        texts = [c.choices[0].delta.content for c in chunks if c.choices]
        assert "".join(texts) == whole.choices[0].message.content
        assert chunks[-1].usage == whole.usage
        assert chunks[0].choices[0].delta.role == "assistant"
        endings = [c.choices[0].finish_reason for c in chunks if c.choices]
        assert endings == [None] * (len(endings) - 1) + [whole.choices[0].finish_reason]
        counts = chunks[-1].metrics["speculative_decoding"]
        assert counts["num_draft_tokens"] > 0

        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        import json

        reply = locked.client.send(
            "POST", "/v1/chat/completions", json.dumps(given).encode(), **headers
        )
        assert reply.text == whole.choices[0].message.content


def test_log_probabilities_are_the_same_streamed_and_whole(client: Any) -> None:
    given = {"messages": MESSAGES, "max_tokens": 16, "seed": 6, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(model="tiny", **given).choices[0]
    told = whole.logprobs.content
    assert "".join(one.token for one in told).startswith(whole.message.content[:8])
    assert all(len(one.top_logprobs) == 2 and one.logprob <= 0 for one in told)
    stream = client.chat.completions.create(model="tiny", stream=True, **given)
    streamed = [one for chunk in stream for one in chunk.choices[0].logprobs.content]
    assert [one.token for one in streamed] == [one.token for one in told]
    for one, other in zip(streamed, told, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)  # of another batch
    answer = client.completions.create(model="tiny", prompt="the", max_tokens=5, seed=1, logprobs=2)
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.completion_tokens


def test_the_requests_of_vllms_benchmark_are_served(client: Any, locked: LiveServer) -> None:
    """The fields of `vllm bench serve`, whose client counts tokens by the usage of a stream."""
    given = {
        "prompt": "the cat sat",
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 12,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    import json

    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    body = json.dumps({"model": "tiny", **given}).encode()
    reply = locked.client.send("POST", "/v1/completions", body, **headers)
    assert reply.status == 200, reply.body
    lines = [line for line in reply.body.decode().split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert events[-1]["usage"]["completion_tokens"] == 12
    assert sum(event["choices"][0]["num_tokens"] for event in events[:-1]) == 12


def test_completions_and_their_streams_agree_under_load(client: Any) -> None:
    def ask(seed: int, stream: bool) -> str:
        answer = client.completions.create(
            model="tiny", prompt="the cat", max_tokens=5 + 3 * seed, seed=seed, stream=stream
        )
        if not stream:
            return str(answer.choices[0].text)
        return "".join(chunk.choices[0].text for chunk in answer)

    alone = [ask(seed, False) for seed in range(8)]
    with ThreadPoolExecutor(16) as pool:
        both = list(pool.map(ask, [*range(8), *range(8)], [True] * 8 + [False] * 8))
    assert both == alone + alone


def test_errors_are_the_clients_own_exceptions(client: Any, locked: LiveServer) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError, match="'tools' is not supported") as error:
        create(model="tiny", messages=MESSAGES, tools=[{"type": "function", "function": {}}])
    assert error.value.param == "tools"
    assert error.value.request_id
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
        create(model="gpt", messages=MESSAGES)
    stranger = openai.OpenAI(
        base_url=f"http://127.0.0.1:{locked.port}/v1", api_key="no", max_retries=0
    )
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_a_stream_that_fails_raises_in_the_client(
    client: Any, locked: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = client.completions.create(
        model="tiny", prompt="the", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)

    def fail(*args: Any) -> None:
        raise RuntimeError

    with monkeypatch.context() as patch:
        patch.setattr(locked.llm.engine.runner, "round", fail)
        with pytest.raises(openai.APIError, match="failed to answer"):
            list(stream)


def test_closing_a_stream_ends_its_request(client: Any, locked: LiveServer) -> None:
    from live_server import until

    stream = client.completions.create(
        model="tiny", prompt="the", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    stream.close()
    until(lambda: locked.front.num_open == 0)
