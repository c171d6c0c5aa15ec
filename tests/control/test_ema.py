"""The RFC's policy: its EMA, its moves, and plain decoding with backoff."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from looped_spec.control.config import AdaptiveSpecConfig, BatchBucket
from looped_spec.control.controller import AdaptiveController
from looped_spec.control.plan import PLAIN, Candidate, RoundFeedback, SpeculationPlan

LADDER = (PLAIN, Candidate(1, 1), Candidate(2, 1), Candidate(4, 1))
UP, DOWN = (1.0, 0.8, 0.7, 1.0), (0.0, 0.3, 0.5, 0.4)


def controller(initial: int = 1, **options: Any) -> AdaptiveController:
    """Return one of the ladder, with an interval of 4 rounds after a warm-up of 4."""
    options = {"warmup_rounds": 4, "interval": 4, "ema_beta": 0.5} | options
    bucket = BatchBucket(1, 8, LADDER, initial, up=UP, down=DOWN)
    return AdaptiveController(AdaptiveSpecConfig(4, (bucket,), "ema", **options))


def play(
    target: AdaptiveController, rounds: int, accepted: Callable[[int], int]
) -> list[SpeculationPlan]:
    """Run rounds of one request that keeps `accepted(K)` drafts; return the plans."""
    plans = []
    for _ in range(rounds):
        plan = target.plan(1)
        k = plan.candidate.num_speculative_tokens
        target.observe(RoundFeedback(plan.plan_id, (k,), (accepted(k),), 0.005))
        plans.append(plan)
    return plans


def lengths(plans: list[SpeculationPlan]) -> list[int]:
    """Return the K of each plan."""
    return [plan.candidate.num_speculative_tokens for plan in plans]


def test_the_ema_is_that_of_the_rfc() -> None:
    target = controller(3, interval=1000)
    rate = None
    for accepted in (4, 1, 0, 3, 2):
        plan = target.plan(2)
        target.observe(RoundFeedback(plan.plan_id, (4, 2), (accepted, 0), 0.005))
        new = accepted / 6
        rate = new if rate is None else 0.5 * rate + 0.5 * new
    assert rate is not None
    scores = target.explain().buckets[0].scores
    assert scores[3].score == pytest.approx(rate)
    assert scores[1].score == 0.0, "every candidate has an EMA of its own"


def test_it_moves_one_position_at_a_time_after_each_interval() -> None:
    assert lengths(play(controller(), 14, lambda k: k)) == [1] * 4 + [2] * 4 + [4] * 6


def test_it_moves_down_and_never_out_of_the_list() -> None:
    target = controller(3)
    assert lengths(play(target, 8, lambda k: 1))[:8] == [4] * 4 + [2] * 4
    assert set(lengths(play(target, 40, lambda k: 1))) <= {1, 2, 4}


@pytest.mark.parametrize(("accepted", "proposed", "k"), [(8, 10, 1), (7, 10, 2)])
def test_an_acceptance_exactly_at_the_threshold_stays(accepted: int, proposed: int, k: int) -> None:
    target = controller(k)
    for _ in range(40):
        plan = target.plan(1)
        full, rest = divmod(accepted, k)
        kept = (k,) * full + ((rest,) if rest else ())
        kept += (0,) * (proposed // k - len(kept))
        target.observe(RoundFeedback(plan.plan_id, (k,) * len(kept), kept, 0.005))
    assert target.plan(1).candidate.num_speculative_tokens == k


def test_no_move_is_made_before_the_warm_up() -> None:
    target = controller(warmup_rounds=10, interval=2)
    assert lengths(play(target, 11, lambda k: k)) == [1] * 10 + [2]


def test_off_waits_twice_as_long_after_each_probe_that_failed() -> None:
    target = controller(probe_interval=4, max_probe_interval=16, probe_rounds=2)
    plans = play(target, 120, lambda k: 0)
    starts = [
        number for number, plan in enumerate(plans) if plan.probe and not plans[number - 1].probe
    ]
    gaps = [b - a for a, b in pairwise(starts)]
    assert gaps[:4] == [2 + 8, 2 + 16, 2 + 16, 2 + 16]
    assert all(plan.candidate in (PLAIN, Candidate(1, 1)) for plan in plans)


def test_a_probe_that_finds_the_gain_turns_drafting_on() -> None:
    target = controller(probe_interval=4, probe_rounds=2)
    play(target, 30, lambda k: 0)
    plans = play(target, 60, lambda k: k)
    on = next(n for n, plan in enumerate(plans) if plan.candidate != PLAIN and not plan.probe)
    assert on <= 20
    assert lengths(plans)[-1] == 4


def test_new_requests_shorten_the_wait() -> None:
    target = controller(probe_interval=4, max_probe_interval=512, probe_rounds=2)
    play(target, 300, lambda k: 0)
    target.plan(1, new_requests=1)
    assert any(plan.probe for plan in play(target, 12, lambda k: 0))


def test_derived_thresholds_turn_off_what_ideal_costs_say_does_not_pay() -> None:
    bucket = BatchBucket(1, 1, (PLAIN, Candidate(2, 2)), 1)
    target = AdaptiveController(AdaptiveSpecConfig(4, (bucket,), "ema"))
    assert set(lengths(play(target, 60, lambda k: 2))) == {2}
    assert 0 in lengths(play(target, 60, lambda k: 0))


def test_late_feedback_moves_the_candidate_that_ran() -> None:
    target = controller()
    late = [target.plan(1) for _ in range(4)]
    play(target, 8, lambda k: k)
    before = target.explain().buckets[0].scores[1].score
    for plan in late:
        target.observe(RoundFeedback(plan.plan_id, (1,), (0,), 0.005))
    scores = target.explain().buckets[0].scores
    assert scores[1].score < 0.1 * before
    assert scores[2].score == 1.0
