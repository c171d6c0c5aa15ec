"""A round may be submitted before the one ahead of it is read, and no text tells of it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from recorded_graphs import Recorded
from toys import (
    GREEDY,
    PROMPTS,
    ScriptedToy,
    assert_all_free,
    like,
    oracle_text,
    run_to_end,
    shared_toy,
)

from looped_spec.control.config import AdaptiveSpecConfig
from looped_spec.control.controller import AdaptiveController
from looped_spec.control.plan import PLAIN, Candidate, RoundFeedback, SpeculationPlan
from looped_spec.control.static import StaticPolicy
from looped_spec.errors import NotFiniteError
from looped_spec.runtime.early_exit import ExitRule
from looped_spec.runtime.engine import Engine
from looped_spec.runtime.readback import Readback
from looped_spec.runtime.request import Request, Status
from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.engine import make_engine

LONG = SamplingParams(temperature=0.0, max_tokens=24)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=17)
each_choice = pytest.mark.parametrize(("k", "d"), [(0, 0), (1, 1), (3, 2)])


def engine_of(k: int, d: int, adapter: Any = None, **options: Any) -> Engine:
    return make_engine(
        adapter or shared_toy(),
        num_speculative_tokens=k,
        draft_loops=d,
        async_scheduling=True,
        **options,
    )


def in_flight(engine: Engine) -> list[Request]:
    return list(engine._in_flight.requests) if engine._in_flight else []


@each_choice
def test_a_round_is_submitted_before_the_one_ahead_of_it_is_read(
    k: int, d: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    made, wait = Readback.__init__, Readback.wait

    def noted_make(self: Readback, numbers: Any) -> None:
        events.append("submit")
        made(self, numbers)

    def noted_wait(self: Readback) -> Any:
        events.append("read")
        return wait(self)

    monkeypatch.setattr(Readback, "__init__", noted_make)
    monkeypatch.setattr(Readback, "wait", noted_wait)
    engine = engine_of(k, d)
    request = engine.add_request(PROMPTS[0], LONG)
    run_to_end(engine)
    assert request.output_token_ids == oracle_text(PROMPTS[0], LONG)
    assert events[:5] == ["submit", "submit", "read", "submit", "read"]
    assert 0 <= events.count("submit") - events.count("read") <= 1, "at most one is discarded"


@each_choice
@pytest.mark.parametrize("num_blocks", [None, 16])
def test_mixed_loads_get_the_text_of_plain_decoding(k: int, d: int, num_blocks: int | None) -> None:
    """Also with so little memory that requests are preempted."""
    dice = random.Random(k)
    engine = engine_of(k, d, num_blocks=num_blocks, block_size=3, max_model_len=40)
    requests: list[tuple[Request, list[int], SamplingParams]] = []
    for number in range(9):
        prompt = list(PROMPTS[number % 3])
        params = SamplingParams(
            temperature=dice.choice([0.0, 0.9]), seed=number, max_tokens=dice.randrange(1, 25)
        )
        requests.append((engine.add_request(prompt, params), prompt, params))
        for _ in range(dice.randrange(4)):
            engine.step()
    run_to_end(engine)
    for request, prompt, params in requests:
        assert request.output_token_ids == oracle_text(prompt, params)
    if num_blocks is not None:
        assert engine.scheduler.num_preemptions > 0
    assert_all_free(engine)


@each_choice
def test_a_step_commits_one_round_and_leaves_one_in_flight(k: int, d: int) -> None:
    engine = engine_of(k, d)
    request = engine.add_request(PROMPTS[0], LONG)
    engine.step()
    rounds = []
    while request.finish_reason is None:
        rounds.append(request.metrics.num_rounds)
        assert in_flight(engine) in ([request], [])
        engine.step()
    assert rounds == list(range(rounds[0], rounds[0] + len(rounds)))


@each_choice
def test_an_end_mark_discards_at_most_the_round_behind_it(k: int, d: int) -> None:
    text = oracle_text(PROMPTS[0], LONG)
    end = text[7]
    engine = engine_of(k, d, eos_token_ids=[end])
    request = engine.add_request(PROMPTS[0], LONG)
    run_to_end(engine)
    assert request.output_token_ids == text[: text.index(end) + 1]
    assert request.finish_reason == "stop"
    # Its memory and row are free; whoever comes next starts from a clean table.
    other = engine.add_request(PROMPTS[1], SAMPLED)
    run_to_end(engine)
    assert other.output_token_ids == oracle_text(PROMPTS[1], SAMPLED)
    assert engine.num_discarded_rounds <= 1
    assert_all_free(engine)


@each_choice
def test_one_that_ends_does_not_hold_up_the_others(k: int, d: int) -> None:
    short = SamplingParams(temperature=0.0, max_tokens=6)
    engine = engine_of(k, d)
    requests = [
        (engine.add_request(p, q), p, q)
        for p, q in zip(PROMPTS, (LONG, short, SAMPLED), strict=True)
    ]
    run_to_end(engine)
    for request, prompt, params in requests:
        assert request.output_token_ids == oracle_text(prompt, params)
    assert_all_free(engine)


@each_choice
def test_an_aborted_request_gets_nothing_of_the_round_in_flight(k: int, d: int) -> None:
    engine = engine_of(k, d, max_num_seqs=2, eos_token_ids=())
    first, second = (engine.add_request(p, LONG) for p in PROMPTS[:2])
    for _ in range(3):
        engine.step()
    assert in_flight(engine) == [first, second]
    known = list(first.output_token_ids)
    engine.abort(first)
    # The newcomer takes its row and its blocks while its round is still in flight.
    third = engine.add_request(PROMPTS[2], SAMPLED)
    run_to_end(engine)
    assert first.output_token_ids == known and first.finish_reason == "abort"
    assert second.output_token_ids == oracle_text(PROMPTS[1], LONG)
    assert third.output_token_ids == oracle_text(PROMPTS[2], SAMPLED)
    assert_all_free(engine)


def test_a_request_that_is_aborted_alone_leaves_a_round_that_nobody_reads() -> None:
    engine = engine_of(2, 1, max_num_seqs=1)
    request = engine.add_request(PROMPTS[0], LONG)
    for _ in range(3):
        engine.step()
    engine.abort(request)
    assert not engine.has_work
    again = engine.add_request(PROMPTS[0], LONG)
    run_to_end(engine)
    assert again.output_token_ids == oracle_text(PROMPTS[0], LONG)
    assert engine.num_discarded_rounds == 1
    assert_all_free(engine)


def test_a_number_that_is_used_again_does_not_get_the_round_of_its_former_owner() -> None:
    engine = engine_of(2, 1, max_num_seqs=1)
    old = engine.add_request(PROMPTS[0], LONG)
    for _ in range(3):
        engine.step()
    engine.abort(old)
    new = engine.make_request(PROMPTS[1], SAMPLED)
    new.request_id = old.request_id
    engine.scheduler.add(new)
    run_to_end(engine)
    assert new.output_token_ids == oracle_text(PROMPTS[1], SAMPLED)


def test_dropping_all_requests_in_the_middle_loses_no_memory() -> None:
    engine = engine_of(3, 2)
    requests = [engine.add_request(p, LONG) for p in PROMPTS]
    for _ in range(2):
        engine.step()
    engine.drop(requests)
    assert_all_free(engine)
    again = engine.add_request(PROMPTS[0], LONG)
    run_to_end(engine)
    assert again.output_token_ids == oracle_text(PROMPTS[0], LONG)


def test_newcomers_are_prefilled_in_the_step_after_they_came() -> None:
    engine = engine_of(1, 1)
    first = engine.add_request(PROMPTS[0], LONG)
    for _ in range(3):
        engine.step()
    late = engine.add_request(PROMPTS[1], LONG)
    engine.step()  # commits what is in flight and submits nothing behind it
    assert in_flight(engine) == [] and late.status is Status.WAITING
    engine.step()
    assert late.output_token_ids == oracle_text(PROMPTS[1], LONG)[: len(late.output_token_ids)]
    assert late.output_token_ids
    run_to_end(engine)
    assert first.output_token_ids == oracle_text(PROMPTS[0], LONG)


class Watching:
    """A fixed candidate, with all that is heard of its rounds."""

    def __init__(self, candidate: Candidate) -> None:
        self.candidate = candidate
        self.plans: list[SpeculationPlan] = []
        self.heard: list[RoundFeedback] = []
        self.new = 0

    def plan(
        self, batch_size: int, *, context_tokens: int = 0, new_requests: int = 0
    ) -> SpeculationPlan:
        self.new += new_requests
        self.plans.append(SpeculationPlan(len(self.plans), self.candidate))
        return self.plans[-1]

    def observe(self, feedback: RoundFeedback) -> None:
        self.heard.append(feedback)


def test_the_policy_hears_of_each_round_once_in_order_and_counts_newcomers_once() -> None:
    engine = engine_of(0, 0)
    policy = engine.policy = Watching(Candidate(2, 1))
    for prompt in PROMPTS:
        engine.add_request(prompt, LONG)
    run_to_end(engine)
    heard = [feedback.plan_id for feedback in policy.heard]
    assert heard == list(range(len(heard)))
    assert 0 <= len(policy.plans) - len(heard) <= 1
    assert policy.new == len(PROMPTS)
    assert all(feedback.seconds > 0 for feedback in policy.heard)


def test_a_change_of_policy_credits_the_round_in_flight_to_whoever_planned_it() -> None:
    engine = engine_of(0, 0)
    before = engine.policy = Watching(PLAIN)
    request = engine.add_request(PROMPTS[0], LONG)
    for _ in range(3):
        engine.step()
    after = engine.policy = Watching(Candidate(2, 2))
    run_to_end(engine)
    assert request.output_token_ids == oracle_text(PROMPTS[0], LONG)
    assert len(before.heard) == len(before.plans)
    assert all(f.num_speculative_tokens == 0 for f in before.heard)
    assert after.heard and all(f.num_speculative_tokens for f in after.heard[:-1])


@pytest.mark.parametrize("policy", ["goodput", "ema"])
def test_an_adaptive_controller_chooses_one_round_ahead(policy: str) -> None:
    engine = engine_of(0, 0, max_num_seqs=4)
    config = AdaptiveSpecConfig.default(engine.runner.full_loops, 4, policy=policy)
    engine.policy, engine.candidates = AdaptiveController(config), frozenset(config.candidates)
    requests = [engine.add_request(p, LONG) for p in PROMPTS]
    run_to_end(engine)
    for request, prompt in zip(requests, PROMPTS, strict=True):
        assert request.output_token_ids == oracle_text(prompt, LONG)
    stats = engine.policy.stats()  # type: ignore[attr-defined]
    assert not stats.stale_feedback and not stats.invalid_feedback


def test_values_that_are_not_finite_fail_the_request_and_spare_the_others() -> None:
    class Breaking(ScriptedToy):
        limit = 12
        broken = True

        def readout(self, state: Any, ctx: Any) -> Any:
            logits = super().readout(state, ctx)
            if not self.broken:
                return logits
            bad = (ctx.positions >= self.limit)[..., None] & (ctx.seeds == 99)[:, None, None]
            return logits.masked_fill(ctx.logit_rows(bad), float("nan"))

    adapter = like(Breaking)
    adapter.script = {}
    engine = engine_of(2, 1, adapter, max_num_seqs=2)
    bad = engine.add_request(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=20, seed=99))
    good = engine.add_request(PROMPTS[1], GREEDY)
    with pytest.raises(NotFiniteError, match="request 0"):
        run_to_end(engine)
    assert in_flight(engine) == [], "what was submitted behind it is not read"
    engine.abort(bad)
    run_to_end(engine)
    assert good.output_token_ids == oracle_text(PROMPTS[1], GREEDY)
    assert_all_free(engine)


def test_memory_that_is_short_makes_rounds_wait_and_changes_no_text() -> None:
    # 7 + 24 tokens need 11 blocks of 3: just enough, so that the last drafts find none.
    engine = engine_of(3, 2, num_blocks=11, block_size=3, max_num_seqs=1, max_model_len=33)
    request = engine.add_request(PROMPTS[0], LONG)
    run_to_end(engine)
    assert request.output_token_ids == oracle_text(PROMPTS[0], LONG)


def test_early_exit_goes_on_as_without_it() -> None:
    engine = engine_of(0, 0)
    assert engine.async_scheduling
    engine.policy = StaticPolicy(PLAIN)
    runner = engine.runner
    runner.exit_rule = ExitRule("any", 0.5, 1, runner.full_loops)
    other = Engine(
        runner, engine.scheduler, StaticPolicy(PLAIN), max_model_len=64, async_scheduling=True
    )
    assert not other.async_scheduling


def test_it_works_together_with_captured_rounds() -> None:
    engine = engine_of(3, 2, graph_backend=Recorded())
    requests = [engine.add_request(p, SAMPLED) for p in PROMPTS]
    run_to_end(engine)
    assert [r.output_token_ids for r in requests] == [oracle_text(p, SAMPLED) for p in PROMPTS]
    assert engine.runner.graphs.stats.replays and not engine.runner.graphs.stats.eager_rounds
