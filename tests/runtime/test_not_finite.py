"""A request whose numbers are not finite ends with an error, and no other notices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from toys import GREEDY, PROMPTS, assert_all_free, like, oracle_text, run_to_end

from looped_spec.adapter import LoopState, StageContext
from looped_spec.errors import NotFiniteError
from looped_spec.runtime.early_exit import ExitRule
from looped_spec.runtime.request import Request
from looped_spec.runtime.sampler import NOT_FINITE, mark_not_finite
from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.engine import make_engine
from looped_spec.testing.toy import ToyAdapter

POISON = 59  # no oracle text and no prompt of the others has this token
BAD_PROMPT = [1, 2, POISON, 3]


class PoisonToy(ToyAdapter):
    """A toy whose embedding of one token is NaN."""

    def prelude(self, tokens: Tensor, ctx: StageContext) -> LoopState:
        state = super().prelude(tokens, ctx)
        factor = torch.where(tokens == POISON, torch.nan, 1.0)[..., None]
        return tuple(part * factor for part in state)


def engine_of(**setup: Any) -> Any:
    return make_engine(like(PoisonToy), **{"num_blocks": 24, "block_size": 8, **setup})


def run_dropping_what_fails(engine: Any) -> list[Request]:
    """Step to the end; after a failure give each request a step of its own and drop those that
    fail in it. Return the dropped."""
    dropped = []
    for _ in range(500):
        if not engine.has_work:
            return dropped
        try:
            engine.step()
        except NotFiniteError:
            for request in list(engine.scheduler.running):
                try:
                    with engine.scheduler.alone(request):
                        engine.step()
                except NotFiniteError:
                    engine.drop([request])
                    dropped.append(request)
    raise AssertionError("work left")


@pytest.mark.parametrize("speculation", [(0, 0), (2, 1), (3, 2)])
@pytest.mark.parametrize("limit", [2, 3, 16])
@pytest.mark.parametrize("budget", [512, 2])
def test_others_in_the_batch_get_the_text_that_they_get_alone(
    speculation: tuple[int, int], limit: int, budget: int
) -> None:
    k, d = speculation
    engine = engine_of(num_speculative_tokens=k, draft_loops=d, max_num_batched_tokens=budget)
    bad = engine.add_request(BAD_PROMPT, SamplingParams(temperature=0.0, max_tokens=limit))
    good = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    assert run_dropping_what_fails(engine) == [bad]
    assert bad.output_token_ids == []
    assert [r.output_token_ids for r in good] == [oracle_text(p, GREEDY) for p in PROMPTS]
    assert_all_free(engine)


@pytest.mark.parametrize("speculation", [(0, 0), (2, 1)])
def test_whoever_gets_the_blocks_next_gets_them_clean(speculation: tuple[int, int]) -> None:
    k, d = speculation
    engine = engine_of(num_speculative_tokens=k, draft_loops=d, num_blocks=6)
    bad = engine.add_request([POISON, *range(1, 8)], GREEDY)
    with pytest.raises(NotFiniteError, match=f"NaN or infinity for request {bad.request_id} after"):
        run_to_end(engine)
    engine.drop([bad])
    for prompt in (PROMPTS[1], PROMPTS[0]):  # a short one first, which reads what it never wrote
        request = engine.add_request(prompt, GREEDY)
        run_to_end(engine)
        assert request.output_token_ids == oracle_text(prompt, GREEDY)
    assert all(pool.isfinite().all() for pair in engine.runner.pool.planes for pool in pair)


def test_a_draft_that_is_not_finite_commits_no_wrong_token() -> None:
    """The draft of every round is the poison; its row is NaN, and masked by the rows before it."""

    class PoisonDraftToy(PoisonToy):
        def draft_readout(self, state: LoopState, ctx: StageContext) -> Tensor:
            logits = super().readout(state, ctx)
            logits[..., POISON] = logits.amax() + 1
            return logits

    engine = make_engine(
        like(PoisonDraftToy), num_speculative_tokens=1, draft_loops=1, num_blocks=24, block_size=8
    )
    requests = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    dropped = run_dropping_what_fails(engine)
    for request, prompt in zip(requests, PROMPTS, strict=True):
        expected = oracle_text(prompt, GREEDY)
        assert request.output_token_ids == expected[: len(request.output_token_ids)]
        assert request in dropped or request.output_token_ids == expected
    assert_all_free(engine)


def test_early_exit_tells_it_too() -> None:
    engine = engine_of(exit_rule=ExitRule("gate", 1.0, 1, 4))
    bad = engine.add_request(BAD_PROMPT, GREEDY)
    good = engine.add_request(PROMPTS[0], GREEDY)
    assert run_dropping_what_fails(engine) == [bad]
    assert good.output_token_ids == oracle_text(PROMPTS[0], GREEDY)


@pytest.mark.parametrize(
    ("logits", "is_finite"),
    [
        ([0.0, 1.0], True),
        ([0.0, -torch.inf], True),
        ([0.0, torch.nan], False),
        ([0.0, torch.inf], False),
        ([-torch.inf, -torch.inf], False),
    ],
)
def test_what_counts_as_finite(logits: list[float], is_finite: bool) -> None:
    tokens = torch.tensor([[1]])
    marked = mark_not_finite(tokens, torch.tensor([[logits]]))
    assert marked.item() == (1 if is_finite else NOT_FINITE)
