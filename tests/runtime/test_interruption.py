"""Newcomers in the middle of a round: they get their first token there, and nobody else another
text."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
from recorded_graphs import Recorded
from toys import GREEDY, PROMPTS, assert_all_free, like, oracle_text, run_to_end, shared_toy

from looped_spec.adapter import LoopState, StageContext
from looped_spec.control.plan import Candidate, RoundFeedback, SpeculationPlan
from looped_spec.control.static import StaticPolicy
from looped_spec.errors import NotFiniteError
from looped_spec.runtime.early_exit import ExitRule
from looped_spec.runtime.engine import Engine
from looped_spec.runtime.request import Request, Status
from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.engine import make_engine
from looped_spec.testing.toy import ToyAdapter

SAMPLED = SamplingParams(temperature=0.9, seed=5, max_tokens=9)
SHORT = SamplingParams(temperature=0.0, max_tokens=1)
CHOICES = [(0, 0), (1, 1), (3, 2)]
FULL_LOOPS = 4
LONG_PROMPT = [*range(1, 20)]


def num_passes(k: int, d: int) -> int:
    """Loop passes of a round with K drafts of depth d."""
    return (k + 1) * d + FULL_LOOPS - d if k else FULL_LOOPS


def engine_of(k: int, d: int, adapter: ToyAdapter | None = None, **setup: Any) -> Engine:
    return make_engine(
        shared_toy() if adapter is None else adapter,
        num_speculative_tokens=k,
        draft_loops=d,
        **setup,
    )


class Arrivals:
    """Queues requests when it is asked for the `at`-th time, and counts how often it is asked."""

    def __init__(self, engine: Engine, at: int, *prompts: tuple[list[int], SamplingParams]) -> None:
        self.engine, self.at, self.prompts = engine, at, prompts
        self.asked = 0
        self.requests: list[Request] = []
        self.before: Callable[[], object] = lambda: None

    def __call__(self) -> bool:
        self.asked += 1
        if self.asked != self.at:
            return False
        self.before()
        self.requests = [self.engine.add_request(p, one) for p, one in self.prompts]
        return True


def decoding(engine: Engine, *params: SamplingParams) -> list[Request]:
    """Requests that have had a round."""
    requests = [engine.add_request(p, one) for p, one in zip(PROMPTS, params, strict=False)]
    engine.step()
    engine.step()
    assert all(request.status is Status.DECODING for request in requests)
    return requests


def assert_texts(requests: list[Request], prompts: list[list[int]]) -> None:
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.output_token_ids == oracle_text(prompt, request.params)


@pytest.mark.parametrize(
    ("k", "d", "at"), [(k, d, at) for k, d in CHOICES for at in range(1, num_passes(k, d) + 1)]
)
def test_at_any_pass_newcomers_get_a_first_token_and_all_texts_stay(
    k: int, d: int, at: int
) -> None:
    engine = engine_of(k, d)
    old = decoding(engine, GREEDY, SAMPLED)
    known = [len(request.output_token_ids) for request in old]
    come = Arrivals(engine, at, (PROMPTS[2], GREEDY), (PROMPTS[1], SHORT))
    seen: list[Request] = []

    def first_tokens(requests: list[Request]) -> None:
        seen.extend(requests)
        assert [len(request.output_token_ids) for request in requests] == [1, 1]
        assert [len(request.output_token_ids) for request in old] == known, "the round is over"

    touched = engine.step(first_tokens, come)
    assert come.asked == at, "asked again after somebody came"
    assert sorted(r.request_id for r in seen) == sorted(r.request_id for r in come.requests)
    assert set(touched) == {*old, *come.requests}
    assert come.requests[1].finish_reason == "length" and come.requests[1].row == -1
    run_to_end(engine)
    assert_texts([*old, *come.requests], [PROMPTS[0], PROMPTS[1], PROMPTS[2], PROMPTS[1]])
    assert_all_free(engine)


@pytest.mark.parametrize(("k", "d"), CHOICES)
def test_it_is_asked_before_every_pass_while_nobody_comes(k: int, d: int) -> None:
    engine = engine_of(k, d)
    decoding(engine, GREEDY)
    nobody = Arrivals(engine, 0)
    engine.step(None, nobody)
    assert nobody.asked == num_passes(k, d)


def test_in_every_step_somebody_may_come_and_those_who_decode_go_on() -> None:
    engine = engine_of(3, 2, max_num_seqs=8)
    (old,) = decoding(engine, GREEDY)
    come: list[Request] = []

    def one() -> bool:
        come.append(engine.add_request(PROMPTS[len(come) % 3], SHORT))
        return True

    while old.finish_reason is None:
        before = len(old.output_token_ids), len(come)
        engine.step(None, one)
        assert len(old.output_token_ids) > before[0] and len(come) == before[1] + 1
    assert all(len(request.output_token_ids) == 1 for request in come)
    run_to_end(engine)
    assert_texts([old], [PROMPTS[0]])
    assert_all_free(engine)


def test_without_a_row_or_memory_or_with_little_budget_nobody_is_pushed_out() -> None:
    full = engine_of(3, 2, max_num_seqs=1)
    small = engine_of(3, 2, num_blocks=7)  # the first has grown to 4 and drafts into a fifth
    tight = engine_of(3, 2, max_num_batched_tokens=4)
    for engine in (full, small, tight):
        (old,) = decoding(engine, GREEDY)
        rows, blocks = old.row, list(old.blocks)
        come = Arrivals(engine, 2, (LONG_PROMPT, SAMPLED))
        engine.step(None, come)
        (new,) = come.requests
        assert not new.output_token_ids
        assert (old.row, old.blocks[: len(blocks)]) == (rows, blocks)
        assert old.metrics.num_preemptions == 0
        run_to_end(engine)
        assert_texts([old, new], [PROMPTS[0], LONG_PROMPT])
        assert_all_free(engine)


def test_a_long_prompt_gets_what_is_left_of_the_steps_budget() -> None:
    engine = engine_of(1, 1, max_num_batched_tokens=10)
    (old,) = decoding(engine, GREEDY)
    come = Arrivals(engine, 1, (LONG_PROMPT, GREEDY))
    engine.step(None, come)
    (new,) = come.requests
    assert new.status is Status.PREFILLING and new.num_computed == 10 - 2
    run_to_end(engine)
    assert_texts([old, new], [PROMPTS[0], LONG_PROMPT])


def test_a_prefix_that_another_has_computed_is_taken_over_in_the_middle_of_a_round() -> None:
    engine = engine_of(3, 2, prefix_caching=True)
    (old,) = decoding(engine, GREEDY)
    first = engine.add_request(LONG_PROMPT, GREEDY)
    engine.step()
    come = Arrivals(engine, 2, ([*LONG_PROMPT, 3], GREEDY))
    engine.step(None, come)
    assert come.requests[0].num_cached_tokens == 16 and come.requests[0].output_token_ids
    run_to_end(engine)
    assert_texts([old, first, *come.requests], [PROMPTS[0], LONG_PROMPT, [*LONG_PROMPT, 3]])


class ToldPolicy(StaticPolicy):
    """Keeps what it hears."""

    def __init__(self, candidate: Candidate) -> None:
        super().__init__(candidate)
        self.plans: list[tuple[int, int]] = []
        self.heard: list[RoundFeedback] = []

    def plan(
        self, batch_size: int, *, context_tokens: int = 0, new_requests: int = 0
    ) -> SpeculationPlan:
        self.plans.append((batch_size, new_requests))
        return super().plan(batch_size, context_tokens=context_tokens, new_requests=new_requests)

    def observe(self, feedback: RoundFeedback) -> None:
        self.heard.append(feedback)


class SlowPrompts(ToyAdapter):
    """Takes long for more than 4 tokens."""

    def prelude(self, tokens: Any, ctx: StageContext) -> LoopState:
        if tokens.shape[1] > 4:
            time.sleep(0.3)
        return super().prelude(tokens, ctx)


def pause(*_: object) -> None:
    time.sleep(0.3)


@pytest.mark.parametrize("slow", ["to be taken", "to be computed", "to be told of"])
def test_the_policy_hears_nothing_of_the_newcomers_nor_of_their_time(slow: str) -> None:
    engine = engine_of(3, 2, like(SlowPrompts) if slow == "to be computed" else None)
    decoding(engine, GREEDY)
    policy = engine.policy = ToldPolicy(Candidate(3, 2))
    come = Arrivals(engine, 3, (LONG_PROMPT, GREEDY))
    if slow == "to be taken":
        come.before = pause
    engine.step(pause if slow == "to be told of" else None, come)
    engine.step()
    assert policy.plans == [(1, 0), (2, 1)]
    assert [len(feedback.accepted) for feedback in policy.heard] == [1, 2]
    assert policy.heard[0].seconds < 0.2


@pytest.mark.parametrize(
    "setup",
    [
        {"async_scheduling": True},
        {"graph_backend": Recorded()},
        {"exit_rule": ExitRule("gate", 0.5, 1, FULL_LOOPS)},
    ],
    ids=["submitted ahead", "captured", "early exit"],
)
def test_rounds_that_cannot_stand_still_do_not(setup: dict[str, Any]) -> None:
    k, d = (0, 0) if "exit_rule" in setup else (3, 2)
    engine = engine_of(k, d, **setup)
    decoding(engine, GREEDY)
    nobody = Arrivals(engine, 0)
    engine.step(None, nobody)
    assert nobody.asked == 0


class Failing(ToyAdapter):
    """Does `effect` to the state of a prompt of more than 4 tokens, once."""

    effect: Callable[[LoopState], LoopState] | None = None

    def loop(self, state: LoopState, index: int, ctx: StageContext) -> LoopState:
        state = super().loop(state, index, ctx)
        if self.effect is not None and ctx.positions.shape[1] > 4:
            effect, self.effect = self.effect, None
            return effect(state)
        return state


class BrokenError(Exception):
    """What a prompt raises."""


def breaking(state: LoopState) -> LoopState:
    raise BrokenError


def not_finite(state: LoopState) -> LoopState:
    return tuple(part * float("nan") for part in state)


@pytest.mark.parametrize("at", range(1, num_passes(3, 2) + 1))
@pytest.mark.parametrize(
    ("effect", "error"), [(breaking, BrokenError), (not_finite, NotFiniteError)]
)
def test_a_newcomer_that_fails_costs_the_others_a_round_and_nothing_else(
    at: int, effect: Any, error: type[Exception]
) -> None:
    adapter = like(Failing)
    engine = engine_of(3, 2, adapter)
    old = decoding(engine, GREEDY, SAMPLED)
    adapter.effect = effect
    come = Arrivals(engine, at, (LONG_PROMPT, GREEDY))
    with pytest.raises(error):
        engine.step(None, come)
    engine.abort(come.requests[0])
    again = engine.add_request(LONG_PROMPT, GREEDY)
    run_to_end(engine)
    assert_texts([*old, again], [PROMPTS[0], PROMPTS[1], LONG_PROMPT])
    assert_all_free(engine)


def test_an_interruption_from_outside_leaves_what_can_be_cleared() -> None:
    """Ctrl-C in the middle of newcomers' prompts."""
    engine = engine_of(3, 2)
    old = decoding(engine, GREEDY)
    come = Arrivals(engine, 2, (LONG_PROMPT, GREEDY))

    def stop(requests: list[Request]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.step(stop, come)
    engine.drop([*old, *come.requests])
    assert_all_free(engine)
    again = [engine.add_request(p, GREEDY) for p in PROMPTS]
    for _ in itertools.takewhile(lambda _: engine.has_work, range(200)):
        engine.step(None, Arrivals(engine, 0))
    assert_texts(again, list(PROMPTS))
