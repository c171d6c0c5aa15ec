"""One round: what it computes, what it commits, what it leaves in the cache."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from toys import (
    GREEDY,
    PROMPTS,
    READOUT_PLANE,
    VOCAB,
    ScriptedToy,
    WatchedToy,
    flat,
    like,
    oracle_text,
    run_to_end,
    slots_of,
)

from looped_spec.adapter import LoopState, StageContext
from looped_spec.control.plan import Candidate
from looped_spec.runtime import round_program
from looped_spec.runtime.engine import Engine
from looped_spec.runtime.request import Request
from looped_spec.runtime.round import RoundOutput, speculative_round
from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.engine import make_engine

PROMPT = PROMPTS[0]
LONG = SamplingParams(temperature=0.0, max_tokens=30)
CACHE_TOLERANCE = 1e-4  # fp32, other shapes of matrix products
LOOPS = 4


def after_prefill(adapter: ScriptedToy | WatchedToy, k: int, d: int) -> tuple[Engine, Request]:
    """An engine whose only request has its first token and no round yet."""
    engine = make_engine(
        adapter, num_speculative_tokens=k, draft_loops=d, max_num_seqs=1, block_size=3
    )
    request = engine.add_request(PROMPT, LONG)
    engine.step()
    assert len(request.output_token_ids) == 1
    return engine, request


def script(right: int, k: int) -> dict[int, int]:
    """Drafts of the first round: `right` good ones, then bad ones, for any length of the run."""
    first = len(PROMPT) + 1
    want = oracle_text(PROMPT, LONG)[1 : k + 1]
    return {first + i: token if i < right else (token + 1) % VOCAB for i, token in enumerate(want)}


def cache_of(request: Request, engine: Engine, positions: list[int]) -> list[torch.Tensor]:
    slots = slots_of(request, positions, engine.runner.pool.block_size)
    return [flat(pages)[slots] for pair in engine.runner.pool.planes for pages in pair]


def cache_of_a_fresh_engine(tokens: list[int]) -> list[torch.Tensor]:
    """Keys and values of `tokens` when they are a prompt."""
    engine = make_engine(like(ScriptedToy), max_num_seqs=1, block_size=3)
    request = engine.add_request(tokens, LONG)
    engine.step()
    return cache_of(request, engine, list(range(len(tokens))))


@pytest.mark.parametrize(("k", "d"), [(0, 0), (1, 1), (2, 3), (4, 1), (4, 2), (8, 3)])
@pytest.mark.parametrize("batch", [1, 3])
def test_every_position_and_loop_is_computed_exactly_once(k: int, d: int, batch: int) -> None:
    adapter = like(WatchedToy)
    engine = make_engine(adapter, num_speculative_tokens=k, draft_loops=d)
    requests = [engine.add_request(p, LONG) for p in PROMPTS[:batch]]
    engine.step()
    adapter.calls.clear()
    starts = [request.num_tokens - 1 for request in requests]
    engine.step()

    for row, start in enumerate(starts):
        loops = Counter(
            (position, call.index)
            for call in adapter.calls
            if call.stage == "loop"
            for position in call.positions[row].tolist()
        )
        assert loops == Counter(
            {(start + i, loop): 1 for i in range(k + 1) for loop in range(LOOPS)}
        )
        preludes = Counter(
            position
            for call in adapter.calls
            if call.stage == "prelude"
            for position in call.positions[row].tolist()
        )
        assert preludes == Counter({start + i: 1 for i in range(k + 1)})
    shapes = Counter(tuple(c.positions.shape) for c in adapter.calls if c.stage == "loop")
    if k:
        assert shapes == {(batch, 1): d * (k + 1), (batch, k + 1): LOOPS - d}
    else:
        assert shapes == {(batch, 1): LOOPS}
    assert sum(call.stage == "draft_readout" for call in adapter.calls) == k
    assert sum(call.stage == "readout" for call in adapter.calls) == 1


@pytest.mark.parametrize(("k", "d"), [(0, 0), (3, 2)])
def test_a_model_that_cannot_resume_drafts_k_rows_and_verifies_from_its_prelude(
    k: int, d: int
) -> None:
    adapter = like(WatchedToy, depth_conditioned=True)
    engine = make_engine(adapter, num_speculative_tokens=k, draft_loops=d)
    engine.add_request(PROMPT, LONG)
    engine.step()
    adapter.calls.clear()
    engine.step()
    shapes = Counter((c.stage, c.positions.shape[1]) for c in adapter.calls)
    drafting = {("prelude", 1): k, ("loop", 1): k * d, ("draft_readout", 1): k} if k else {}
    verifying = {("prelude", k + 1): 1, ("loop", k + 1): LOOPS, ("readout", k + 1): 1}
    assert shapes == {**drafting, **verifying}


@pytest.mark.parametrize("conditioned", [False, True])
@pytest.mark.parametrize("right", range(5))
def test_each_rejection_position_and_the_bonus_commit_the_right_frontier(
    right: int, conditioned: bool
) -> None:
    adapter = like(ScriptedToy, depth_conditioned=conditioned)
    want = oracle_text(PROMPT, LONG, depth_conditioned=conditioned)
    drafts = [t if i < right else (t + 1) % VOCAB for i, t in enumerate(want[1:5])]
    adapter.script = {len(PROMPT) + 1 + i: token for i, token in enumerate(drafts)}
    engine, request = after_prefill(adapter, 4, 2)
    result = engine.runner.round([request], Candidate(4, 2))
    assert result.accepted == [right]
    assert result.tokens[0][: right + 1] == want[1 : right + 2]

    engine.step()
    assert request.output_token_ids == want[: right + 2]
    assert request.num_computed == len(PROMPT) + right + 1
    assert request.metrics.num_accepted_tokens == right
    adapter.script = {}
    run_to_end(engine)
    assert request.output_token_ids == want


@pytest.mark.parametrize("right", range(4))
@pytest.mark.parametrize("k", [0, 3])
def test_a_round_says_where_the_next_one_starts(
    right: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs: list[RoundOutput] = []

    def keep(*args: Any, **kwargs: Any) -> RoundOutput:
        outputs.append(speculative_round(*args, **kwargs))
        return outputs[-1]

    monkeypatch.setattr(round_program, "speculative_round", keep)
    adapter = like(ScriptedToy)
    adapter.script = script(right, k)
    engine, request = after_prefill(adapter, k, 2 if k else 0)
    engine.step()
    [out] = outputs
    accepted = min(right, k)
    assert out.accepted.tolist() == [accepted]
    assert out.next_token.tolist() == [oracle_text(PROMPT, LONG)[accepted + 1]]
    assert out.next_position.tolist() == [len(PROMPT) + accepted + 1]
    assert (request.last_token, request.num_tokens - 1) == (
        out.next_token.item(),
        out.next_position.item(),
    )


@pytest.mark.parametrize("right", range(5))
def test_the_cache_up_to_the_frontier_is_that_of_a_fresh_engine(right: int) -> None:
    adapter = like(ScriptedToy)
    adapter.script = script(right, 4)
    engine, request = after_prefill(adapter, 4, 1)
    engine.step()
    frontier = len(PROMPT) + right + 1
    tokens = request.known_tokens(0, frontier)
    got = cache_of(request, engine, list(range(frontier)))
    for mine, fresh in zip(got, cache_of_a_fresh_engine(tokens), strict=True):
        assert (mine - fresh).abs().max() < CACHE_TOLERANCE


@pytest.mark.parametrize("right", range(5))
def test_what_rejected_rows_left_is_hidden_and_overwritten(right: int) -> None:
    adapter = like(ScriptedToy)
    adapter.script = script(right, 4)
    engine, request = after_prefill(adapter, 4, 2)
    engine.step()
    frontier = len(PROMPT) + right + 1
    held = len(request.blocks) * 3
    slots = slots_of(request, list(range(frontier, held)), 3)
    for pair in engine.runner.pool.planes:
        for pages in pair:
            flat(pages)[slots] = 1e4
    adapter.script = {}
    engine.step()
    computed = list(range(frontier, request.num_computed))
    assert computed
    assert all(part.abs().max() < 1e3 for part in cache_of(request, engine, computed))
    run_to_end(engine)
    assert request.output_token_ids == oracle_text(PROMPT, LONG)


class SpoilingToy(ScriptedToy):
    """A toy that leaves nonsense in the readout plane after each draft."""

    spoil = None

    def draft_readout(self, state: LoopState, ctx: StageContext) -> torch.Tensor:
        logits = super().draft_readout(state, ctx)
        if self.spoil is not None:
            self.spoil(ctx.positions[0].tolist())
        return logits


@pytest.mark.parametrize("right", [0, 2, 4])
def test_verification_overwrites_the_readout_plane_of_the_drafts(right: int) -> None:
    adapter = like(SpoilingToy)
    adapter.script = script(right, 4)
    engine, request = after_prefill(adapter, 4, 2)
    spoiled: list[int] = []

    def spoil(positions: list[int]) -> None:
        spoiled.extend(positions)
        slots = slots_of(request, positions, 3)
        for pages in engine.runner.pool.planes[READOUT_PLANE]:
            flat(pages)[slots] = 77.0

    adapter.spoil = spoil
    engine.step()
    assert spoiled == [len(PROMPT) + i for i in range(4)]
    assert all(
        (flat(pages)[slots_of(request, spoiled, 3)] != 77.0).all()
        for pages in engine.runner.pool.planes[READOUT_PLANE]
    )
    frontier = len(PROMPT) + right + 1
    got = cache_of(request, engine, list(range(frontier)))
    fresh = cache_of_a_fresh_engine(request.known_tokens(0, frontier))
    for mine, other in zip(got, fresh, strict=True):
        assert (mine - other).abs().max() < CACHE_TOLERANCE


def test_rows_of_one_batch_accept_each_their_own() -> None:
    adapter = like(ScriptedToy)
    prompts = ([5, 6], [7, 8, 9, 10], [1, 2, 3, 4, 5, 6, 7, 8])  # rounds at positions far apart
    want = [oracle_text(p, GREEDY) for p in prompts]
    adapter.script = {}
    engine = make_engine(adapter, num_speculative_tokens=2, draft_loops=1)
    requests = [engine.add_request(p, GREEDY) for p in prompts]
    engine.step()
    rights = (0, 1, 2)
    for prompt, text, right in zip(prompts, want, rights, strict=True):
        for i in range(2):
            adapter.script[len(prompt) + 1 + i] = (text[1 + i] + (i >= right)) % VOCAB
    # The scripts of rows must not meet, or a row would get another's drafts.
    assert len(adapter.script) == 6
    engine.step()
    assert [len(r.output_token_ids) for r in requests] == [2 + right for right in rights]
    assert [r.output_token_ids for r in requests] == [
        text[: 2 + right] for text, right in zip(want, rights, strict=True)
    ]
