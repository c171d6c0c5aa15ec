"""Computed prompts are taken over by later requests, and no text changes by it."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from toys import VOCAB, WatchedToy, assert_all_free, like, oracle_text, run_to_end, shared_toy

from looped_spec.adapter import LoopState, StageContext
from looped_spec.control.plan import Candidate
from looped_spec.control.static import StaticPolicy
from looped_spec.errors import NotFiniteError
from looped_spec.runtime.early_exit import ExitRule
from looped_spec.runtime.engine import Engine
from looped_spec.runtime.kv_cache import BlockAllocator, KVPool
from looped_spec.runtime.prefix_cache import hash_blocks
from looped_spec.runtime.request import Request
from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.engine import make_engine, run_all
from looped_spec.testing.oracle import dense_generate
from looped_spec.testing.toy import TOY_CONFIG, ToyAdapter

BLOCK = 4
PREFIX = list(range(1, 13))  # three blocks
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
TINY = {"hidden_size": 8, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "num_layers": 1}


class SeededToy(ToyAdapter):
    """A toy whose initial state is drawn by the seed of the request, as some families' is."""

    def __init__(self, config: Any, options: Any) -> None:
        super().__init__(config, options)
        self.capabilities = dataclasses.replace(self.capabilities, seed_free=False)

    def prelude(self, tokens: Tensor, ctx: StageContext) -> LoopState:
        hidden, embedded = super().prelude(tokens, ctx)
        drawn = (ctx.seeds[:, None, None] * 31 + ctx.positions[..., None] * 17) % 11
        return hidden + drawn.to(hidden.dtype) / 11, embedded


def engine_of(adapter: ToyAdapter | None = None, **changes: Any) -> Engine:
    settings = {"prefix_caching": True, "block_size": BLOCK, **changes}
    return make_engine(adapter or shared_toy(), **settings)


def one(engine: Engine, prompt: list[int], params: SamplingParams = GREEDY) -> Request:
    (request,) = run_all(engine, [prompt], params)
    return request


def computed_positions(toy: WatchedToy) -> list[int]:
    """The positions of prompt rows that went through the prelude since the last call."""
    rows = [call.positions for call in toy.calls if call.stage == "prelude"]
    toy.calls.clear()
    return sorted({int(p) for positions in rows for p in positions.flatten()})


def test_only_what_no_earlier_request_has_computed_is_computed() -> None:
    toy = like(WatchedToy)
    engine = engine_of(toy)
    one(engine, [*PREFIX, 20, 21], SamplingParams(temperature=0.0, max_tokens=1))
    assert computed_positions(toy) == list(range(14))
    request = one(engine, [*PREFIX, 30, 31], SamplingParams(temperature=0.0, max_tokens=1))
    assert computed_positions(toy) == [12, 13]
    assert request.num_cached_tokens == request.output().num_cached_tokens == 12
    stats = engine.scheduler.prefix_cache
    assert stats is not None and (stats.num_queries, stats.num_hits) == (28, 12)


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    engine = engine_of()
    first = one(engine, PREFIX)
    second = one(engine, PREFIX)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
    assert second.output_token_ids == first.output_token_ids == oracle_text(PREFIX, GREEDY)


def test_a_block_is_found_only_behind_the_tokens_that_it_was_computed_behind() -> None:
    engine = engine_of()
    one(engine, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    shifted = [9, 2, 3, 4, 5, 6, 7, 8, 9]
    request = one(engine, shifted)
    assert request.num_cached_tokens == 0
    assert request.output_token_ids == oracle_text(shifted, GREEDY)


def test_generated_tokens_are_not_taken_over() -> None:
    engine = engine_of(num_speculative_tokens=3, draft_loops=1)
    first = one(engine, PREFIX, SamplingParams(temperature=0.0, max_tokens=12))
    request = one(engine, [*PREFIX, *first.output_token_ids])
    assert request.num_cached_tokens == len(PREFIX)
    assert request.output_token_ids == oracle_text([*PREFIX, *first.output_token_ids], GREEDY)


def test_without_the_option_nothing_is_taken_over() -> None:
    engine = engine_of(prefix_caching=False)
    one(engine, PREFIX)
    assert one(engine, PREFIX).num_cached_tokens == 0
    assert engine.scheduler.prefix_cache is None
    assert engine.scheduler.allocator.num_published == 0


def test_a_model_that_depends_on_the_seed_shares_within_a_seed_only() -> None:
    toy = like(SeededToy)
    engine = engine_of(toy)
    for seed, cached in ((1, 0), (2, 0), (1, 8), (2, 8)):
        params = SamplingParams(temperature=0.0, max_tokens=8, seed=seed)
        request = one(engine, PREFIX, params)
        assert request.num_cached_tokens == cached
        expected = dense_generate(
            toy, PREFIX, 8, full_loops=TOY_CONFIG["full_loops"], params=params, seed=seed
        )
        assert request.output_token_ids == expected


def test_requests_that_run_at_once_share_blocks_that_nobody_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of(num_speculative_tokens=3, draft_loops=1)
    one(engine, [*PREFIX, 20])
    allocator = engine.scheduler.allocator
    write = KVPool.write

    def guarded(pool: KVPool, plane: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        written = {int(slot) // BLOCK for slot in slots}
        assert not written & set(allocator._hashes), "a block that can be found is written"
        write(pool, plane, slots, k, v)

    monkeypatch.setattr(KVPool, "write", guarded)
    prompts = [[*PREFIX, token] for token in (20, 30, 40)]
    requests = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    engine.step()
    assert len({tuple(request.blocks[:3]) for request in requests}) == 1
    assert len({request.blocks[3] for request in requests}) == 3
    run_to_end(engine)
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.output_token_ids == oracle_text(prompt, GREEDY)
    assert_all_free(engine)


def test_a_prompt_in_chunks_is_found_as_far_as_it_was_computed() -> None:
    engine = engine_of(max_num_batched_tokens=BLOCK)
    request = engine.add_request([*PREFIX, 20], GREEDY)
    engine.step()
    engine.step()
    engine.abort(request)
    assert one(engine, [*PREFIX, 20]).num_cached_tokens == 8


def test_a_preempted_request_takes_up_its_own_prompt_again() -> None:
    toy = like(WatchedToy)
    engine = engine_of(toy, num_blocks=7, max_num_seqs=2)
    params = SamplingParams(temperature=0.0, max_tokens=12)
    prompts = [PREFIX[:9], PREFIX[1:10]]
    requests = run_all(engine, prompts, params)
    assert engine.scheduler.num_preemptions
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.output_token_ids == oracle_text(prompt, params)
        assert request.num_cached_tokens == 0  # it computed all of it once
    stats = engine.scheduler.prefix_cache
    assert stats is not None and (stats.num_queries, stats.num_hits) == (18, 0)


def test_the_blocks_unused_for_longest_are_given_out_first() -> None:
    engine = engine_of(num_blocks=9, max_model_len=24)
    a, b = [1, *PREFIX[:8]], [2, *PREFIX[:8]]
    short = SamplingParams(temperature=0.0, max_tokens=1)
    for prompt in (a, b, a):  # a was used last
        one(engine, prompt, short)
    one(engine, [3] * 23, short)  # takes six of the nine blocks
    assert one(engine, a, short).num_cached_tokens == 8
    assert one(engine, b, short).num_cached_tokens < 8


class Poisoned(ToyAdapter):
    """A toy that computes NaN in the first loop of chosen positions, once."""

    poison: int | None = None

    def loop(self, state: LoopState, index: int, ctx: StageContext) -> LoopState:
        hidden, embedded = super().loop(state, index, ctx)
        if index == 0 and self.poison is not None:
            hidden = hidden.masked_fill((ctx.positions == self.poison)[..., None], torch.nan)
        return hidden, embedded


@pytest.mark.parametrize("budget", [BLOCK, 512], ids=["in chunks", "whole"])
def test_a_poisoned_block_is_never_taken_over(budget: int) -> None:
    toy = like(Poisoned)
    engine = engine_of(toy, max_num_batched_tokens=budget)
    toy.poison = 6
    request = engine.add_request([*PREFIX, 20], GREEDY)
    with pytest.raises(NotFiniteError):
        run_to_end(engine)
    toy.poison = None
    engine.abort(request)
    again = one(engine, [*PREFIX, 20])
    assert again.num_cached_tokens == 0
    assert again.output_token_ids == oracle_text([*PREFIX, 20], GREEDY)
    assert one(engine, [*PREFIX, 20]).num_cached_tokens == 12


def test_what_runs_through_a_fault_publishes_nothing_behind_it() -> None:
    toy = like(Poisoned)
    engine = engine_of(toy, max_num_batched_tokens=BLOCK)
    bystander = engine.add_request([*PREFIX, 20], GREEDY)
    engine.step()
    toy.poison = 4
    with pytest.raises(NotFiniteError):
        engine.step()
    toy.poison = None
    run_to_end(engine)
    assert bystander.output_token_ids == oracle_text([*PREFIX, 20], GREEDY)
    assert engine.scheduler.allocator.num_published == 0


def test_dropping_requests_half_done_keeps_the_books() -> None:
    engine = engine_of()
    one(engine, [*PREFIX, 20])
    requests = [engine.add_request([*PREFIX, t], GREEDY) for t in (20, 30)]
    engine.step()
    engine.drop(requests[:1])
    run_to_end(engine)
    assert requests[1].output_token_ids == oracle_text([*PREFIX, 30], GREEDY)
    assert_all_free(engine)
    assert one(engine, [*PREFIX, 40]).output_token_ids == oracle_text([*PREFIX, 40], GREEDY)


def test_early_exit_gives_the_same_with_computed_prompts() -> None:
    rule = ExitRule("gate", 0.4, 1, TOY_CONFIG["full_loops"])
    plain = make_engine(shared_toy(), exit_rule=rule, block_size=BLOCK)
    cached = engine_of(exit_rule=rule, num_blocks=9, max_num_seqs=3)
    prompts = [[*PREFIX, t] for t in (20, 30, 20)]
    expected = [r.output_token_ids for r in run_all(plain, prompts, GREEDY)]
    one(cached, prompts[0])
    requests = run_all(cached, prompts, GREEDY)
    assert [r.output_token_ids for r in requests] == expected
    assert all(r.num_cached_tokens == 12 for r in requests)


@st.composite
def loads(draw: st.DrawFn) -> list[tuple[int, list[int], SamplingParams, int]]:
    """Requests: the step at which each comes, its prompt (a stem and a tail), its parameters, and
    the step at which it is aborted."""
    stems = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [1, 2, 3, 4, 9, 9, 9, 9], [5, 6], []]
    made = []
    for _ in range(draw(st.integers(2, 7))):
        tail = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
        params = SamplingParams(
            temperature=draw(st.sampled_from([0.0, 1.0])),
            max_tokens=draw(st.integers(1, 9)),
            seed=draw(st.integers(0, 1)),
        )
        abort = draw(st.one_of(st.none(), st.integers(0, 12)))
        prompt = [*draw(st.sampled_from(stems)), *tail]
        made.append((draw(st.integers(0, 10)), prompt, params, -1 if abort is None else abort))
    return made


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    loads(),
    st.integers(7, 14),
    st.sampled_from([3, 4, 16]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**20),
)
def test_under_any_load_every_text_is_that_without_the_cache(
    load: list[tuple[int, list[int], SamplingParams, int]],
    num_blocks: int,
    budget: int,
    seeded: bool,
    is_async: bool,
    dice_seed: int,
) -> None:
    adapter = like(SeededToy, **TINY) if seeded else shared_toy(**TINY)
    dice = random.Random(dice_seed)
    engine = engine_of(
        adapter,
        num_blocks=num_blocks,
        max_model_len=26,
        max_num_batched_tokens=budget,
        async_scheduling=is_async,
    )
    requests: list[tuple[Request, int]] = []
    step = 0
    waiting = sorted(load, key=lambda item: item[0])
    while waiting or engine.has_work:
        while waiting and waiting[0][0] <= step:
            _, prompt, params, abort = waiting.pop(0)
            requests.append((engine.add_request(prompt, params), abort))
        for request, abort in requests:
            if abort == step and request.finish_reason is None:
                engine.abort(request)
        if dice.random() < 0.3:
            engine.policy = StaticPolicy(Candidate(dice.randint(0, 3), 1))
        engine.step()
        step += 1
        assert step < 1000
    assert_all_free(engine)
    depth = adapter.geometry.default_full_loops
    for request, _ in requests:
        expected = dense_generate(
            adapter,
            request.prompt_token_ids,
            request.params.max_tokens,
            full_loops=depth,
            params=request.params,
            seed=request.seed,
        )
        got = request.output_token_ids
        assert got == expected[: len(got)]
        assert request.finish_reason == "abort" or got == expected


def test_hashes_cover_full_blocks_all_before_them_and_the_seed() -> None:
    tokens = list(range(10))
    hashes = hash_blocks(tokens, 4, None)
    assert len(hashes) == 2 and hash_blocks(tokens[:3], 4, None) == []
    assert hash_blocks(tokens[:8], 4, None) == hashes
    other_start = hash_blocks([VOCAB - 1, *tokens[1:]], 4, None)
    assert not set(other_start) & set(hashes)
    assert len({hash_blocks(tokens, 4, seed)[0] for seed in (None, 0, 1, -1)}) == 4


def test_the_allocator_counts_a_shared_block_as_used_until_its_last_holder_is_gone() -> None:
    allocator = BlockAllocator(3)
    blocks = allocator.allocate(2)
    assert blocks is not None
    allocator.publish(blocks[0], b"a")
    allocator.publish(blocks[1], b"a")  # the same again: the first stays
    assert allocator.find([b"a", b"b"]) == blocks[:1]
    mine = allocator.claim(blocks[:1], 1)
    assert mine is not None and mine[0] == blocks[0] and allocator.num_free == 0
    allocator.free(blocks)
    assert allocator.num_free == 1
    assert allocator.claim(blocks[:1], 2) is None and allocator.num_free == 1
    allocator.free(mine)
    assert allocator.num_free == 3 and allocator.find([b"a"]) == blocks[:1]
    assert allocator.claim(blocks[:1], 2, spare=1) is None
    taken = allocator.allocate(3)
    assert taken is not None and taken[-1] == blocks[0], "what is known is given out last"
    assert allocator.find([b"a"]) == []
    with pytest.raises(KeyError):
        allocator.free([taken[0], taken[0]])
