"""The goodput policy by what it hands out, played against texts of known acceptance."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from looped_spec.control.config import AdaptiveSpecConfig, BatchBucket
from looped_spec.control.controller import AdaptiveController
from looped_spec.control.cost import CostTable, analytic_ms
from looped_spec.control.default_config import default_depths
from looped_spec.control.plan import (
    PLAIN,
    Candidate,
    RoundFeedback,
    ShadowCounts,
    SpeculationPlan,
)

ARMS = (PLAIN, *(Candidate(k, d) for d in (1, 2) for k in (1, 2, 4)))
READOUT_MS = 0.1


def ms(batch_size: int, context_tokens: int, candidate: Candidate) -> float:
    """Return the ideal time of a round of 4 loops of 1 ms."""
    return analytic_ms(4, candidate)


def config(**options: Any) -> AdaptiveSpecConfig:
    """Return one of `ARMS` whose cost table is right."""
    cost = CostTable.sampled(ms, ARMS, (1, 16))
    return AdaptiveSpecConfig(4, (BatchBucket(1, 16, ARMS, 1),), **({"cost": cost} | options))


class Play:
    """A controller and a text; `chances` is draft depth -> acceptance of every draft."""

    def __init__(self, target: AdaptiveController, seed: int = 0) -> None:
        self.target, self.draw = target, random.Random(seed)
        self.lost_ms = self.total_ms = 0.0

    def run(
        self, rounds: int, batch_size: int, chances: Mapping[int, float], new: int = 0
    ) -> list[SpeculationPlan]:
        plans = []
        for number in range(rounds):
            plan = self.target.plan(
                batch_size, context_tokens=300, new_requests=0 if number else new
            )
            candidate = plan.candidate
            k = candidate.num_speculative_tokens
            kept = tuple(
                [self.kept(k, chances.get(candidate.draft_loops, 0.0)) for _ in range(batch_size)]
            )
            shadow = []
            for depth in plan.shadow_depths:
                rows = tuple([accepted + 1 for accepted in kept])
                counts = tuple([self.kept(row, chances[depth]) for row in rows])
                shadow.append(ShadowCounts(depth, rows, counts))
            time_ms = ms(1, 0, candidate) + READOUT_MS * len(shadow)
            self.total_ms += time_ms
            self.lost_ms += time_ms - ms(1, 0, PLAIN) * (1 + sum(kept) / batch_size)
            self.target.observe(
                RoundFeedback(
                    plan.plan_id,
                    (k,) * batch_size,
                    kept,
                    time_ms / 1000 * self.draw.uniform(0.97, 1.03),
                    shadow=tuple(shadow),
                )
            )
            plans.append(plan)
        return plans

    def kept(self, k: int, chance: float) -> int:
        """Return how many of k drafts are kept."""
        kept = 0
        while kept < k and self.draw.random() < chance:
            kept += 1
        return kept


def usual(plans: list[SpeculationPlan]) -> Candidate:
    """Return what ran most."""
    ran = [plan.candidate for plan in plans]
    return max(set(ran), key=ran.count)


@pytest.mark.parametrize(
    ("chances", "wanted"),
    [
        ({1: 0.05, 2: 0.1}, PLAIN),
        ({1: 0.4, 2: 0.45}, Candidate(1, 1)),
        ({1: 0.92, 2: 0.93}, Candidate(4, 1)),
        ({1: 0.2, 2: 0.95}, Candidate(4, 2)),
    ],
)
def test_it_comes_to_the_candidate_with_the_most_tokens_per_second(
    chances: dict[int, float], wanted: Candidate
) -> None:
    rates = {
        arm: sum(chances.get(arm.draft_loops, 0.0) ** i for i in range(5)[: _k(arm) + 1])
        / ms(1, 0, arm)
        for arm in ARMS
    }
    assert max(ARMS, key=rates.__getitem__) == wanted, "the case is what it says"
    play = Play(AdaptiveController(config()))
    play.run(200, 8, chances)
    assert usual(play.run(100, 8, chances)) == wanted


def _k(candidate: Candidate) -> int:
    return candidate.num_speculative_tokens


@pytest.mark.parametrize("batch_size", [1, 8])
def test_probes_of_a_hopeless_text_lose_less_than_1_percent(batch_size: int) -> None:
    play = Play(AdaptiveController(config()))
    play.run(2000, batch_size, {1: 0.03, 2: 0.05})
    assert 0.0 < play.lost_ms / play.total_ms < 0.01


def test_readouts_take_the_place_of_probes_where_there_are_any() -> None:
    options = {"shadow_depths_available": True, "shadow_cost_ratio": READOUT_MS}
    play = Play(AdaptiveController(config(**options)))
    play.run(100, 8, {1: 0.03, 2: 0.05})
    plans = play.run(400, 8, {1: 0.03, 2: 0.05})
    assert not any(plan.probe for plan in plans)
    asked = [plan for plan in plans if plan.shadow_depths]
    assert asked
    assert sum(len(plan.shadow_depths) for plan in asked) * READOUT_MS < 0.008 * 400 * 4.0
    back = play.run(40, 8, {1: 0.9, 2: 0.95})
    assert next(n for n, plan in enumerate(back) if _k(plan.candidate)) <= 16


def test_an_engine_that_answers_no_readout_is_asked_no_more() -> None:
    target = AdaptiveController(config(shadow_depths_available=True, shadow_cost_ratio=0.01))
    asked = 0
    for _ in range(3000):
        plan = target.plan(8)
        asked += bool(plan.shadow_depths)
        k = _k(plan.candidate)
        target.observe(RoundFeedback(plan.plan_id, (k,) * 8, (0,) * 8, 0.004))
    assert 0 < asked < 100
    assert any("readout" in note for note in target.explain().notes)
    assert target.stats().probe_rounds > 0, "probes are back instead"


def test_what_readouts_really_cost_is_learnt() -> None:
    few, many = (
        AdaptiveController(config(shadow_depths_available=True, shadow_cost_ratio=ratio))
        for ratio in (0.01, 4.0)
    )
    counts = []
    for target in (few, many):
        play = Play(target)
        play.run(3000, 8, {1: 0.9, 2: 0.92})
        counts.append(sum(bool(p.shadow_depths) for p in play.run(600, 8, {1: 0.9, 2: 0.92})))
    assert counts[0] == pytest.approx(counts[1], rel=0.5), "both come to the same, 0.1 a loop"


def test_a_depth_that_was_poor_is_looked_at_again_while_another_runs() -> None:
    play = Play(AdaptiveController(config()))
    play.run(300, 8, {1: 0.2, 2: 0.95})
    assert usual(play.run(50, 8, {1: 0.2, 2: 0.95})).draft_loops == 2
    play.run(400, 8, {1: 0.93, 2: 0.95})
    assert usual(play.run(50, 8, {1: 0.93, 2: 0.95})).draft_loops == 1


def test_without_a_table_the_costs_of_the_device_are_learnt() -> None:
    """On this device drafts are dear: the ideal formula would draft, its times say not to."""
    target = AdaptiveController(config(cost=None))
    draw = random.Random(0)
    for _ in range(300):
        plan = target.plan(4)
        k = _k(plan.candidate)
        kept = tuple([min(k, int(draw.random() < 0.8)) for _ in range(4)])
        seconds = 0.01 * (1 + 1.5 * k) * draw.uniform(0.97, 1.03)
        target.observe(RoundFeedback(plan.plan_id, (k,) * 4, kept, seconds))
    assert target.plan(4).candidate == PLAIN
    assert any("no cost table" in note for note in target.explain().notes)


@pytest.mark.parametrize("full_loops", range(2, 33))
def test_default_candidates_fit_any_depth_of_model(full_loops: int) -> None:
    target = AdaptiveController(AdaptiveSpecConfig.default(full_loops, 64))
    assert target.max_k == 8
    for bucket in target.config.buckets:
        assert bucket.candidates[0] == PLAIN
        assert len(bucket.candidates) > 1
    for size in (1, 7, 64):
        assert target.plan(size).candidate in target.config.candidates


def test_default_depths_are_all_of_a_shallow_model_and_octaves_of_a_deep_one() -> None:
    assert [default_depths(loops) for loops in (1, 2, 4, 8, 16, 32)] == [
        (),
        (1,),
        (1, 2, 3),
        (1, 2, 4),
        (1, 2, 4, 8),
        (2, 4, 8, 16),
    ]


def growing_ms(batch_size: int, context_tokens: int, candidate: Candidate) -> float:
    """Return the time of a round where attention costs as much as all else at 256 tokens."""
    return analytic_ms(4, candidate) * (1.0 + context_tokens / 256)


def test_a_context_that_grows_is_no_news_of_the_candidate_that_runs_meanwhile() -> None:
    cost = CostTable.sampled(growing_ms, ARMS, (1, 16), range(16, 1040, 16))
    target = AdaptiveController(
        AdaptiveSpecConfig(4, (BatchBucket(1, 16, ARMS, 1),), cost=cost), consensus=lambda _: 1
    )
    for context in range(64, 1024):
        plan = target.plan(4, context_tokens=context)
        k = plan.candidate.num_speculative_tokens
        seconds = growing_ms(4, context, plan.candidate) / 1000
        target.observe(RoundFeedback(plan.plan_id, (k,) * 4, (k, 0, k, k), seconds))
    scores = target.explain().buckets[0].scores
    plain = next(one.cost_ms for one in scores if one.candidate == PLAIN)
    for one in scores:
        ideal = analytic_ms(4, one.candidate) / analytic_ms(4, PLAIN)
        assert one.cost_ms / plain == pytest.approx(ideal, rel=0.01)


def test_a_round_that_is_told_of_late_is_compared_with_the_time_of_its_own_context() -> None:
    """Times rise so steeply behind 2048 tokens that their line, drawn back, falls below zero."""
    times = {16: 5.0, 2048: 5.1, 4096: 40.0}
    cells = {
        (4, context, arm.num_speculative_tokens, arm.draft_loops): analytic_ms(4, arm) * time
        for context, time in times.items()
        for arm in ARMS
    }
    config = AdaptiveSpecConfig(4, (BatchBucket(1, 16, ARMS, 1),), cost=CostTable.of(cells))
    target = AdaptiveController(config)
    plan = target.plan(4, context_tokens=32)
    before = target.explain().buckets[0].scores
    target.plan(4, context_tokens=4000)
    k = plan.candidate.num_speculative_tokens
    seconds = 5.0 * analytic_ms(4, plan.candidate) / 1000
    target.observe(RoundFeedback(plan.plan_id, (k,) * 4, (k,) * 4, seconds))
    target.plan(4, context_tokens=32)
    after = target.explain().buckets[0].scores
    for one, other in zip(before, after, strict=True):
        assert other.cost_ms == pytest.approx(one.cost_ms, rel=0.02)


def test_a_depth_that_was_left_for_a_run_of_bad_luck_is_checked_and_taken_up_again() -> None:
    arms = (PLAIN, Candidate(2, 1), Candidate(2, 2))
    cost = CostTable.sampled(ms, arms, (1, 16))
    played = Play(
        AdaptiveController(AdaptiveSpecConfig(4, (BatchBucket(1, 16, arms, 1),), cost=cost))
    )
    text = {1: 0.95, 2: 0.97}
    assert played.run(200, 1, text)[-1].candidate == Candidate(2, 1)
    unlucky = played.run(12, 1, {1: 0.0, 2: 0.97})
    assert any(plan.candidate == Candidate(2, 2) for plan in unlucky)
    after = played.run(16, 1, text)
    assert after[-1].candidate == Candidate(2, 1)
