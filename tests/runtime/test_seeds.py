"""The text of a request depends on its prompt, parameters and seed, and on nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from toys import PROMPTS, oracle_text, shared_toy

from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.engine import make_engine, run_all

PROMPT = PROMPTS[0]
NEIGHBOURS = ([40, 41], [9], [1, 2, 3, 4, 5, 6, 7], [30] * 11)
SEEDS = (0, 1, -1, 77, 2**32, 2**63 - 1, -(2**63))


def text_of(params: SamplingParams, place: int | None, **setup: Any) -> list[int]:
    """The text of PROMPT alone, or at `place` among neighbours."""
    engine = make_engine(shared_toy(), **setup)
    if place is None:
        return run_all(engine, [PROMPT], params)[0].output_token_ids
    prompts, each = (
        list(NEIGHBOURS),
        [SamplingParams(max_tokens=5 * i + 2, seed=i, temperature=i % 2) for i in range(4)],
    )
    prompts.insert(place, PROMPT)
    each.insert(place, params)
    return run_all(engine, prompts, each)[place].output_token_ids


@pytest.mark.parametrize("seed", (77, 2**63 - 1, -(2**63)))
def test_same_seed_same_text_in_any_company(seed: int) -> None:
    params = SamplingParams(seed=seed, max_tokens=14, top_p=0.95)
    want = oracle_text(PROMPT, params)
    spec: dict[str, Any] = {"num_speculative_tokens": 3, "draft_loops": 2}
    assert text_of(params, None) == want
    assert text_of(params, None, **spec) == want
    assert text_of(params, 0, **spec) == want
    assert text_of(params, 4, max_num_seqs=5) == want
    assert text_of(params, 2, **spec, max_num_batched_tokens=5, max_num_seqs=5) == want
    assert text_of(params, 3, **spec, num_blocks=8, max_num_seqs=5) == want
    assert text_of(params, 1, num_speculative_tokens=8, draft_loops=1, block_size=1) == want


def test_other_seeds_give_other_texts() -> None:
    texts = {tuple(text_of(SamplingParams(seed=s, max_tokens=14), None)) for s in SEEDS}
    assert len(texts) == len(SEEDS)


def test_a_preempted_request_goes_on_with_the_same_text() -> None:
    params = SamplingParams(seed=3, max_tokens=20)
    engine = make_engine(
        shared_toy(), num_speculative_tokens=2, draft_loops=1, num_blocks=12, block_size=4
    )
    requests = run_all(engine, [PROMPT, PROMPTS[1], PROMPTS[2]], params)
    assert any(r.metrics.num_preemptions for r in requests)
    assert [r.output_token_ids for r in requests] == [oracle_text(p, params) for p in PROMPTS]


def seeds_given(engine_seed: int, count: int = 200) -> list[int]:
    engine = make_engine(shared_toy(), seed=engine_seed)
    return [engine.add_request([1], SamplingParams()).seed for _ in range(count)]


@pytest.mark.parametrize("engine_seed", [0, 1, -5, 2**63 - 1, -(2**63)])
def test_requests_without_a_seed_get_distinct_ones_that_the_engine_seed_repeats(
    engine_seed: int,
) -> None:
    seeds = seeds_given(engine_seed)
    assert len(set(seeds)) == len(seeds)
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert seeds == seeds_given(engine_seed)
    assert not set(seeds) & set(seeds_given(engine_seed ^ 1))


def test_a_request_without_a_seed_can_be_repeated_with_the_one_it_got() -> None:
    engine = make_engine(shared_toy(), num_speculative_tokens=2, draft_loops=1, seed=9)
    requests = run_all(engine, [PROMPT] * 3, SamplingParams(max_tokens=12))
    assert len({tuple(r.output_token_ids) for r in requests}) == 3
    for request in requests:
        params = SamplingParams(max_tokens=12, seed=request.seed)
        assert oracle_text(PROMPT, params) == request.output_token_ids
