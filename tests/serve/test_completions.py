"""The endpoints that generate, as a client meets them."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from live_server import LiveServer

from looped_spec import LLM, SamplingParams
from looped_spec.serve.generation import params_of_answer

PROMPT = "the cat sat on"
CHAT_PROMPT = f"user: {PROMPT}\nassistant:"


def offline(llm: LLM, prompt: str | list[int], **params: Any) -> Any:
    """What the engine gives without a server around it."""
    given = SamplingParams(**{"max_tokens": 16, **params})
    return llm.generate(prompt, given, use_tqdm=False)[0]


@pytest.fixture(scope="module")
def reference(shared: LiveServer, model: Any) -> LLM:
    """Another instance of the same model, without speculation: the plain way."""
    return LLM(model, num_speculative_tokens=0, max_num_seqs=4)


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"seed": 7}, {"seed": 8, "top_p": 0.9}])
def test_a_completion_is_what_plain_decoding_gives(
    server: LiveServer, reference: LLM, fields: dict[str, Any]
) -> None:
    reply = server.client.complete(PROMPT, max_tokens=12, **fields)
    expected = offline(reference, PROMPT, max_tokens=12, **fields)
    assert reply.status == 200
    assert reply.text == expected.outputs[0].text
    assert reply.json["usage"] == {
        "prompt_tokens": len(expected.prompt_token_ids),
        "completion_tokens": len(expected.outputs[0].token_ids),
        "total_tokens": len(expected.prompt_token_ids) + len(expected.outputs[0].token_ids),
    }
    assert reply.json["choices"][0]["finish_reason"] == expected.outputs[0].finish_reason
    assert reply.json["object"] == "text_completion"
    assert reply.json["model"] == "tiny"


def test_a_chat_is_rendered_by_the_models_template(server: LiveServer, reference: LLM) -> None:
    expected = offline(reference, CHAT_PROMPT, max_tokens=9, temperature=0)
    reply = server.client.chat(PROMPT, max_tokens=9, temperature=0)
    assert reply.text == expected.outputs[0].text
    assert reply.json["object"] == "chat.completion"
    assert reply.json["choices"][0]["message"]["role"] == "assistant"
    loud = server.client.chat(PROMPT, max_tokens=9, chat_template_kwargs={"shout": True})
    tokens = offline(reference, CHAT_PROMPT.replace("ass", "LOUD ass")).prompt_token_ids
    assert loud.json["usage"]["prompt_tokens"] == len(tokens)


def test_a_message_may_come_in_parts(server: LiveServer) -> None:
    parts = [{"type": "text", "text": "the cat "}, {"type": "text", "text": "sat on"}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 9, "temperature": 0}
    whole = server.client.chat(PROMPT, max_tokens=9, temperature=0)
    assert server.client.post("/v1/chat/completions", body).text == whole.text


def test_a_chat_goes_on_to_the_end_unless_told(server: LiveServer) -> None:
    usage = server.client.chat("hi", seed=3, ignore_eos=True).json["usage"]
    assert usage["total_tokens"] == 512
    assert server.client.complete("hi", ignore_eos=True).json["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "fields", [{"temperature": 0}, {"seed": 5, "n": 3}, {"seed": 6, "stop": "e"}]
)
def test_a_stream_adds_up_to_the_whole_answer(
    server: LiveServer, path: str, fields: dict[str, Any]
) -> None:
    chat = "chat" in path
    given = {"messages": [{"role": "user", "content": PROMPT}]} if chat else {"prompt": PROMPT}
    document = {**given, **fields, "max_tokens": 20, "return_token_ids": True}
    whole = server.client.post(path, document).json
    events = server.client.stream(path, **document, stream_options={"include_usage": True})
    last = events.pop()
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert last["metrics"] == whole["metrics"]
    for choice in whole["choices"]:
        mine = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
        texts = [c["delta"]["content"] if chat else c["text"] for c in mine]
        assert "".join(texts) == (choice["message"]["content"] if chat else choice["text"])
        assert [token for c in mine for token in c["token_ids"]] == choice["token_ids"]
        assert [c["finish_reason"] for c in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
        assert [c["delta"].get("role") for c in mine if chat][:1] == ["assistant"][:chat]


def test_each_event_is_one_group_of_committed_tokens_with_its_count(server: LiveServer) -> None:
    events = server.client.stream(
        "/v1/completions",
        prompt=PROMPT,
        max_tokens=24,
        seed=1,
        ignore_eos=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    last = events.pop()
    counts = [event["choices"][0]["num_tokens"] for event in events]
    assert counts[0] == 1, "the prompt gives the first token"
    assert set(counts) <= {1, 2, 3}, "K = 2 drafts and one more"
    assert [e["usage"]["completion_tokens"] for e in events] == list(itertools.accumulate(counts))
    speculation = last["metrics"]["speculative_decoding"]
    # A round commits what was accepted and one token of the target's own.
    assert sum(counts) == 24 == last["usage"]["completion_tokens"]
    assert speculation["num_accepted_draft_tokens"] == 24 - len(counts)
    assert max(counts) > 1, "this prompt has accepted drafts, or the test shows nothing"


def test_the_keys_of_speculation_are_those_of_vllm_and_agree_with_each_other(
    server: LiveServer,
) -> None:
    reply = server.client.complete(PROMPT, max_tokens=30, seed=1, ignore_eos=True)
    counts = reply.json["metrics"]["speculative_decoding"]
    assert set(counts) == {
        "mean_acceptance_length",
        "draft_acceptance_rate",
        "acceptance_histogram",
        "acceptance_histogram_by_draft_length",
        "num_spec_steps",
        "num_accepted_draft_tokens",
        "num_draft_tokens",
        "num_spec_tokens",
    }
    steps, accepted = counts["num_spec_steps"], counts["num_accepted_draft_tokens"]
    assert counts["num_spec_tokens"] == 2
    assert counts["mean_acceptance_length"] == pytest.approx(1 + accepted / steps)
    assert counts["draft_acceptance_rate"] == pytest.approx(accepted / counts["num_draft_tokens"])
    histogram = counts["acceptance_histogram"]
    assert sum(histogram) == steps
    assert sum(i * count for i, count in enumerate(histogram)) == accepted
    by_length = counts["acceptance_histogram_by_draft_length"]
    assert sum(int(k) * sum(row) for k, row in by_length.items()) == counts["num_draft_tokens"]
    assert [
        sum(row[i : i + 1][0] if i < len(row) else 0 for row in by_length.values())
        for i in range(len(histogram))
    ] == histogram


def test_n_answers_have_seeds_that_follow_from_the_one_given(
    server: LiveServer, reference: LLM
) -> None:
    params = SamplingParams(max_tokens=10, seed=11)
    expected = [
        reference.generate(PROMPT, params_of_answer(params, index), use_tqdm=False)[0]
        for index in range(3)
    ]
    reply = server.client.complete(PROMPT, max_tokens=10, seed=11, n=3)
    texts = [choice["text"] for choice in reply.json["choices"]]
    assert texts == [output.outputs[0].text for output in expected]
    assert len(set(texts)) == 3
    assert texts[0] == server.client.complete(PROMPT, max_tokens=10, seed=11).text
    assert reply.json["usage"]["prompt_tokens"] == len(expected[0].prompt_token_ids)


def test_without_a_seed_answers_differ(server: LiveServer) -> None:
    reply = server.client.complete(PROMPT, max_tokens=16, n=3)
    assert len({choice["text"] for choice in reply.json["choices"]}) == 3


def test_several_prompts_give_their_answers_in_order(server: LiveServer, reference: LLM) -> None:
    prompts = [PROMPT, "then", "the mat"]
    reply = server.client.complete(prompts, max_tokens=6, temperature=0, n=2)
    expected = [
        offline(reference, prompt, max_tokens=6, temperature=0).outputs[0].text
        for prompt in prompts
        for _ in range(2)
    ]
    assert [choice["text"] for choice in reply.json["choices"]] == expected
    assert [choice["index"] for choice in reply.json["choices"]] == list(range(6))


def test_a_prompt_may_be_token_ids(server: LiveServer, reference: LLM) -> None:
    ids = offline(reference, PROMPT).prompt_token_ids
    text = server.client.complete(PROMPT, temperature=0).text
    assert server.client.complete(ids, temperature=0).text == text
    assert server.client.complete([ids, ids], temperature=0).json["choices"][1]["text"] == text


def test_a_stop_string_ends_the_text_and_is_named(server: LiveServer) -> None:
    text = server.client.complete(PROMPT, max_tokens=20, temperature=0, ignore_eos=True).text
    stop = text[8:10]
    fields = {"max_tokens": 20, "temperature": 0, "ignore_eos": True, "stop": ["never", stop]}
    reply = server.client.complete(PROMPT, **fields)
    assert reply.text == text[: text.index(stop)]
    assert reply.json["choices"][0]["finish_reason"] == "stop"
    assert reply.json["choices"][0]["stop_reason"] == stop
    kept = server.client.complete(PROMPT, **fields, include_stop_str_in_output=True)
    assert kept.text == text[: text.index(stop) + len(stop)]


def test_texts_do_not_depend_on_what_runs_beside_them(server: LiveServer) -> None:
    """More requests than rows, streamed and whole, of many lengths: equal seeds, equal texts."""
    work = [
        {"prompt": f"{PROMPT} {number}", "seed": number, "max_tokens": 3 + 5 * number}
        for number in range(8)
    ]
    alone = [server.client.post("/v1/completions", one).text for one in work]

    def whole(one: dict[str, Any]) -> str:
        return server.client.post("/v1/completions", one).text

    def streamed(one: dict[str, Any]) -> str:
        events = server.client.stream("/v1/completions", **one)
        return "".join(event["choices"][0]["text"] for event in events)

    with ThreadPoolExecutor(16) as pool:
        together = [
            (pool.submit(whole, one), pool.submit(streamed, one)) for one in reversed(work)
        ][::-1]
        for expected, (first, second) in zip(alone, together, strict=True):
            assert first.result() == second.result() == expected
