"""Log probabilities are the target's own, whatever is drafted, and belong to the tokens."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import oracle_text, run_to_end, shared_toy

from looped_spec.errors import ConfigError
from looped_spec.runtime.early_exit import ExitRule
from looped_spec.runtime.graphs.backends import TracedGraphs
from looped_spec.runtime.request import Request
from looped_spec.sampling_params import MAX_LOGPROBS, SamplingParams
from looped_spec.testing.engine import make_engine, run_all
from looped_spec.testing.oracle import dense_logits
from looped_spec.testing.toy import TOY_CONFIG

DEPTH, VOCAB = TOY_CONFIG["full_loops"], TOY_CONFIG["vocab_size"]
PROMPT = [1, 2, 3, 4, 5, 6, 7]
TOLERANCE = 1e-4  # sums over other shapes of rows, in float32


def assert_right(request: Request) -> None:
    """Every entry is that of the dense forward over prompt and text."""
    assert request.logprobs is not None
    assert [one.token_id for one in request.logprobs] == request.output_token_ids
    tokens = [*request.prompt_token_ids, *request.output_token_ids]
    logits = dense_logits(shared_toy(), tokens, DEPTH, seed=request.seed)
    scores = logits.float().log_softmax(dim=-1)[len(request.prompt_token_ids) - 1 :]
    for one, row in zip(request.logprobs, scores, strict=False):
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=TOLERANCE)
        above, near = float(row[one.token_id]) + TOLERANCE, float(row[one.token_id]) - TOLERANCE
        assert 1 + int((row > above).sum()) <= one.rank <= 1 + int((row > near).sum())
        count = request.params.logprobs
        assert len(one.top) == count
        best = row.topk(count or 0).values.tolist()
        assert [value for _, value in one.top] == pytest.approx(best, abs=TOLERANCE)
        for token, value in one.top:
            assert value == pytest.approx(float(row[token]), abs=TOLERANCE)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("k", "d"), [(0, 0), (3, 1), (2, 2)])
@pytest.mark.parametrize("is_async", [False, True])
def test_they_are_those_of_full_depth(k: int, d: int, temperature: float, is_async: bool) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=13, seed=3, logprobs=4)
    engine = make_engine(
        shared_toy(), num_speculative_tokens=k, draft_loops=d, async_scheduling=is_async
    )
    (request,) = run_all(engine, [PROMPT], params)
    assert request.output_token_ids == oracle_text(PROMPT, params)
    assert_right(request)
    (completion,) = request.output().outputs
    assert completion.logprobs == request.logprobs
    total = sum(one.logprob for one in request.logprobs or ())
    assert completion.cumulative_logprob == pytest.approx(total)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(st.one_of(st.none(), st.integers(0, 5)), st.integers(1, 9)),
        min_size=1,
        max_size=5,
    ),
    st.booleans(),
    st.integers(0, 2**20),
)
def test_in_any_batch_each_request_gets_what_it_asked_for(
    asked: list[tuple[int | None, int]], is_async: bool, seed: int
) -> None:
    dice = random.Random(seed)
    engine = make_engine(
        shared_toy(),
        num_speculative_tokens=2,
        draft_loops=1,
        num_blocks=12,
        max_model_len=24,
        max_num_batched_tokens=5,
        async_scheduling=is_async,
    )
    requests = []
    for number, (count, length) in enumerate(asked):
        prompt = [dice.randrange(VOCAB) for _ in range(dice.randint(1, 9))]
        params = SamplingParams(max_tokens=length, seed=number, logprobs=count)
        requests.append(engine.add_request(prompt, params))
        for _ in range(dice.randint(0, 2)):
            engine.step()
    run_to_end(engine)
    for request in requests:
        if request.params.logprobs is None:
            assert request.logprobs is None and request.output().outputs[0].logprobs is None
        else:
            assert_right(request)


def test_a_text_that_ends_inside_a_draft_has_no_more_entries_than_tokens() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1)
    whole = oracle_text(PROMPT, params)
    engine = make_engine(
        shared_toy(), num_speculative_tokens=4, draft_loops=2, eos_token_ids=[whole[6]]
    )
    (request,) = run_all(engine, [PROMPT], params)
    assert request.output_token_ids[-1] == whole[6]
    assert_right(request)


def test_only_rounds_with_somebody_who_asks_leave_the_captured_ones() -> None:
    engine = make_engine(
        shared_toy(),
        num_speculative_tokens=1,
        draft_loops=1,
        max_num_seqs=1,
        graph_backend=TracedGraphs(),
    )
    params = SamplingParams(temperature=0.0, max_tokens=9)
    (plain,) = run_all(engine, [PROMPT], params)
    stats = engine.runner.graphs.stats
    assert stats.replays and not stats.eager_rounds
    asks = SamplingParams(temperature=0.0, max_tokens=9, logprobs=0)
    (request,) = run_all(engine, [PROMPT], asks)
    assert set(stats.eager_rounds) == {"logprobs"}
    assert request.output_token_ids == plain.output_token_ids
    assert_right(request)


def test_early_exit_tells_of_the_logits_that_it_chose_by() -> None:
    rule = ExitRule("gate", 2.0, 1, DEPTH)  # nothing leaves: full depth
    params = SamplingParams(max_tokens=8, seed=1, logprobs=2)
    (request,) = run_all(make_engine(shared_toy(), exit_rule=rule), [PROMPT], params)
    assert_right(request)


def test_a_model_with_few_tokens_tells_of_all_of_them() -> None:
    params = SamplingParams(max_tokens=2, seed=1, logprobs=MAX_LOGPROBS)
    (request,) = run_all(make_engine(shared_toy()), [PROMPT], params)
    assert request.logprobs is not None
    assert len(request.logprobs[0].top) == min(MAX_LOGPROBS, VOCAB)
    values = [value for _, value in request.logprobs[0].top]
    assert values == sorted(values, reverse=True)
    assert torch.tensor(values).exp().sum() <= 1 + TOLERANCE


@pytest.mark.parametrize("value", [-1, MAX_LOGPROBS + 1, True, "5", 1.5])
def test_a_wrong_number_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="logprobs must be"):
        SamplingParams(logprobs=value)  # type: ignore[arg-type]
