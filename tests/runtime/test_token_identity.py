"""Speculation, batching, chunking and preemption change no token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toys import GREEDY, PROMPTS, WatchedToy, like, oracle_text, run_to_end, shared_toy

from looped_spec.runtime.engine import Engine
from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.engine import make_engine, run_all
from looped_spec.testing.oracle import dense_generate, dense_logits

SAMPLED = SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, seed=5, max_tokens=16)
MIXED = (
    SamplingParams(temperature=0.7, seed=2**63 - 1, max_tokens=13),
    GREEDY,
    SamplingParams(temperature=1.3, top_p=0.8, seed=-4, max_tokens=18),
)
CHOICES = [(0, 0)] + [(k, d) for k in (1, 2, 4, 8) for d in (1, 2, 3)]
# A bf16 model would need a margin; in fp32 the toy's logits differ by rounding alone.
LOGIT_TOLERANCE = 1e-4

EASY: dict[str, Any] = {}
CHUNKED: dict[str, Any] = {"max_num_batched_tokens": 3, "block_size": 3}
TIGHT: dict[str, Any] = {"num_blocks": 25, "block_size": 1}
LARGE_BLOCKS: dict[str, Any] = {"num_blocks": 3, "block_size": 16}


def texts(engine: Engine, prompts: Any, params: Any) -> list[list[int]]:
    return [request.output_token_ids for request in run_all(engine, prompts, params)]


@pytest.mark.parametrize(("k", "d"), CHOICES)
@pytest.mark.parametrize("setup", [EASY, CHUNKED, TIGHT, LARGE_BLOCKS])
def test_greedy_text_is_that_of_the_oracle(k: int, d: int, setup: dict[str, Any]) -> None:
    engine = make_engine(shared_toy(), num_speculative_tokens=k, draft_loops=d, **setup)
    assert texts(engine, PROMPTS, GREEDY) == [oracle_text(p, GREEDY) for p in PROMPTS]


@pytest.mark.parametrize(("k", "d"), CHOICES)
def test_sampled_text_is_that_of_the_oracle_with_mixed_parameters(k: int, d: int) -> None:
    params = [SAMPLED, *MIXED, SamplingParams(seed=0, max_tokens=9, min_p=0.2)]
    prompts = [*PROMPTS, [50, 51], [3, 2, 1, 0]]
    engine = make_engine(
        shared_toy(), num_speculative_tokens=k, draft_loops=d, max_num_batched_tokens=20
    )
    assert texts(engine, prompts, params) == [
        oracle_text(p, one) for p, one in zip(prompts, params, strict=True)
    ]


@pytest.mark.parametrize(("k", "d"), CHOICES)
def test_a_model_conditioned_on_its_depth_gives_the_text_of_the_oracle(k: int, d: int) -> None:
    changes = {"depth_conditioned": True}
    for params in (GREEDY, MIXED[0]):
        engine = make_engine(
            shared_toy(**changes), num_speculative_tokens=k, draft_loops=d, **TIGHT
        )
        want = [oracle_text(p, params, **changes) for p in PROMPTS]
        assert texts(engine, PROMPTS, params) == want


@pytest.mark.parametrize(("k", "d"), [(0, 0), (1, 1), (3, 2), (8, 3)])
def test_a_lone_request_gives_the_text_of_the_oracle(k: int, d: int) -> None:
    for params in (GREEDY, SAMPLED):
        engine = make_engine(
            shared_toy(), num_speculative_tokens=k, draft_loops=d, max_num_seqs=1, block_size=3
        )
        assert texts(engine, PROMPTS[:1], params) == [oracle_text(PROMPTS[0], params)]


@pytest.mark.parametrize("conditioned", [False, True])
@pytest.mark.parametrize(("full_loops", "k", "d"), [(1, 0, 0), (2, 3, 1), (3, 2, 2)])
def test_fewer_loops_than_the_default_are_the_target_when_asked_for(
    full_loops: int, k: int, d: int, conditioned: bool
) -> None:
    adapter = shared_toy(depth_conditioned=conditioned)
    want = [dense_generate(adapter, p, 12, full_loops=full_loops) for p in PROMPTS]
    engine = make_engine(adapter, num_speculative_tokens=k, draft_loops=d, full_loops=full_loops)
    params = SamplingParams(temperature=0.0, max_tokens=12)
    assert texts(engine, PROMPTS, params) == want
    assert want != [oracle_text(p, params, depth_conditioned=conditioned) for p in PROMPTS]


@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
def test_any_grouping_of_query_heads_gives_the_text_of_the_oracle(heads: tuple[int, int]) -> None:
    changes = {"num_heads": heads[0], "num_kv_heads": heads[1]}
    engine = make_engine(shared_toy(**changes), num_speculative_tokens=3, draft_loops=2)
    want = [oracle_text(p, GREEDY, **changes) for p in PROMPTS]
    assert texts(engine, PROMPTS, GREEDY) == want


@pytest.mark.parametrize(("k", "d"), [(0, 0), (2, 1), (4, 3)])
@pytest.mark.parametrize("conditioned", [False, True])
def test_logits_of_committed_tokens_are_those_of_the_oracle(
    k: int, d: int, conditioned: bool
) -> None:
    adapter = like(WatchedToy, depth_conditioned=conditioned)
    engine = make_engine(
        adapter, num_speculative_tokens=k, draft_loops=d, max_num_seqs=1, block_size=3
    )
    request = engine.add_request(PROMPTS[0], GREEDY)
    run_to_end(engine)
    adapter.target_logits, seen = [], adapter.target_logits
    tokens = [*PROMPTS[0], *request.output_token_ids]
    want = dense_logits(adapter, tokens, 4)
    newest: dict[int, torch.Tensor] = {}
    for positions, logits in seen[1:]:  # after the prompt, whose positions are more than its logits
        for column, position in enumerate(positions[0].tolist()):
            newest[position] = logits[0, column]
    committed = range(len(PROMPTS[0]), len(tokens) - 1)
    assert set(committed) <= set(newest)
    for position in committed:
        assert (newest[position] - want[position]).abs().max() < LOGIT_TOLERANCE
    assert (seen[0][1][0, 0] - want[len(PROMPTS[0]) - 1]).abs().max() < LOGIT_TOLERANCE


@pytest.mark.parametrize("setup", [TIGHT, LARGE_BLOCKS])
def test_preemption_happens_in_the_tight_setups(setup: dict[str, Any]) -> None:
    engine = make_engine(shared_toy(), num_speculative_tokens=4, draft_loops=2, **setup)
    run_all(engine, PROMPTS, GREEDY)
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize(("k", "d"), [(0, 0), (3, 2)])
def test_a_bfloat16_model_and_cache_run_to_the_end(k: int, d: int) -> None:
    adapter = like(WatchedToy)
    adapter.module.bfloat16()
    engine = make_engine(
        adapter, num_speculative_tokens=k, draft_loops=d, dtype=torch.bfloat16, block_size=3
    )
    requests = run_all(engine, PROMPTS, [GREEDY, *MIXED[:1], MIXED[2]])
    assert [len(r.output_token_ids) for r in requests] == [16, 13, 18]
    assert all(logits.isfinite().all() for _, logits in adapter.target_logits)
    assert all(logits.dtype is torch.bfloat16 for _, logits in adapter.target_logits)
