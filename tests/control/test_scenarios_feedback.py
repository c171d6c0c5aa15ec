"""Scenarios of docs/control.md about what feedback counts for."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from looped_spec.control.acceptance import count_trials
from looped_spec.control.config import AdaptiveSpecConfig, BatchBucket
from looped_spec.control.controller import AdaptiveController
from looped_spec.control.cost import CostTable
from looped_spec.control.plan import PLAIN, Candidate, RoundFeedback

ARMS = (PLAIN, Candidate(1, 1), Candidate(4, 2), Candidate(6, 1), Candidate(8, 1))
MS = {PLAIN: 4.0, Candidate(1, 1): 5.0, Candidate(4, 2): 9.0, Candidate(6, 1): 8.5}


def config_of(*arms: Candidate, policy: str = "goodput", **options: Any) -> AdaptiveSpecConfig:
    table = CostTable.sampled(lambda b, n, c: MS.get(c, 9.0), arms, (1, 4, 8, 16))
    return AdaptiveSpecConfig(4, (BatchBucket(1, 32, arms),), policy, cost=table, **options)


def forced(config: AdaptiveSpecConfig, arms: Sequence[Candidate]) -> AdaptiveController:
    """Return a controller that runs these candidates, round by round, whatever it votes for."""
    turns = iter(arms)
    positions = config.buckets[0].candidates.index
    return AdaptiveController(config, consensus=lambda vote: positions(next(turns)))


def learnt(controller: AdaptiveController) -> str:
    return json.dumps(controller.state_dict()["learnt"])


def expected_tokens(controller: AdaptiveController, candidate: Candidate) -> float:
    (bucket,) = controller.explain().buckets
    return next(s.expected_tokens for s in bucket.scores if s.candidate == candidate)


def cost_ms(controller: AdaptiveController, candidate: Candidate) -> float:
    (bucket,) = controller.explain().buckets
    return next(s.cost_ms for s in bucket.scores if s.candidate == candidate)


def drafted(length: int, chance: float, draw: Callable[[], float]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda _: draw() < chance, range(length)))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_late_feedback_is_credited_to_what_ran(order: tuple[int, int]) -> None:
    """Scenario 4: feedback comes after the next plan was made, and in any order."""
    deep, shallow = Candidate(4, 2), Candidate(1, 1)
    tokens = {}
    for good in (deep, shallow):
        controller = forced(config_of(PLAIN, shallow, deep), [shallow, deep] * 20)
        for _ in range(20):
            plans = [controller.plan(4), controller.plan(4)]
            for plan in (plans[number] for number in order):
                k = plan.candidate.num_speculative_tokens
                accepted = k if plan.candidate == good else 0
                ms = MS[plan.candidate] / 1000
                controller.observe(RoundFeedback(plan.plan_id, (k,) * 4, (accepted,) * 4, ms))
        assert controller.stats().invalid_feedback == 0
        tokens[good] = [expected_tokens(controller, arm) for arm in (shallow, deep)]
    assert tokens[shallow][0] > tokens[deep][0] + 0.2
    assert tokens[deep][1] > tokens[shallow][1] + 0.5


@pytest.mark.parametrize("policy", ["ema", "goodput"])
def test_repeated_and_unknown_feedback_is_counted_and_teaches_nothing(policy: str) -> None:
    """Scenario 4: once twice, once for a plan that never was, once for a list that is gone."""
    controller = AdaptiveController(config_of(PLAIN, *ARMS[1:2], policy=policy))
    plan = controller.plan(2)
    k = plan.candidate.num_speculative_tokens
    feedback = RoundFeedback(plan.plan_id, (k, k), (k, k), 0.005)
    controller.observe(feedback)
    before = learnt(controller)
    controller.observe(feedback)
    controller.observe(RoundFeedback(999, (1, 1), (0, 0), 0.005))
    controller.observe(RoundFeedback(-1, (1, 1), (0, 0), 0.005))
    assert learnt(controller) == before
    assert (controller.stats().feedback, controller.stats().stale_feedback) == (1, 3)
    left = controller.plan(2)
    controller.load_state_dict(controller.state_dict())
    controller.observe(RoundFeedback(left.plan_id, (8, 8), (0, 0), 0.005))
    assert (controller.stats().feedback, controller.stats().stale_feedback) == (1, 4)


def test_conditional_trials_of_a_mixed_stream_are_unbiased() -> None:
    """Scenario 24: hard text beside easy text, drafts of any length; within 2 sd of the truth."""
    draw = random.Random(0).random
    trials, hits = [0] * 4, [0] * 4
    for number in range(4000):
        length = (1, 2, 4)[number % 3]
        accepted = [drafted(length, chance, draw) for chance in (0.9, 0.3)]
        counted = count_trials((length, length), accepted, length)
        assert counted is not None
        for position, (count, hit) in enumerate(zip(*counted, strict=True)):
            trials[position] += count
            hits[position] += hit
    for position in range(4):
        # Those that reach a position are the easy ones mostly: p_i = s_i / s_(i - 1).
        reached = 0.9**position + 0.3**position
        truth = (0.9 ** (position + 1) + 0.3 ** (position + 1)) / reached
        deviation = math.sqrt(truth * (1 - truth) / trials[position])
        assert abs(hits[position] / trials[position] - truth) < 2 * deviation


def test_longer_drafts_of_the_same_text_are_no_reason_to_move_down() -> None:
    """Scenario 25: p = 0.8, K from 1 to 8: accepted / proposed falls from 0.80 to 0.42."""
    short, long = Candidate(1, 1), Candidate(8, 1)
    config = config_of(short, long)
    assert config.buckets[0].initial == 0
    controller = AdaptiveController(config)
    draw = random.Random(0).random
    shares: dict[Candidate, list[int]] = {short: [0, 0], long: [0, 0]}
    runs = []
    for _ in range(600):
        plan = controller.plan(8)
        k = plan.candidate.num_speculative_tokens
        accepted = tuple(drafted(k, 0.8, draw) for _ in range(8))
        controller.observe(
            RoundFeedback(plan.plan_id, (k,) * 8, accepted, MS.get(plan.candidate, 9.0) / 1000)
        )
        shares[plan.candidate][0] += sum(accepted)
        shares[plan.candidate][1] += 8 * k
        if not plan.probe:
            runs.append(plan.candidate)
    accepted_sum, proposed_sum = shares[long]
    assert accepted_sum / proposed_sum == pytest.approx(0.42, abs=0.03)
    first = runs.index(long)
    assert set(runs[first:]) == {long}
    assert expected_tokens(controller, short) - 1 == pytest.approx(0.8, abs=0.06)


def test_a_round_cut_short_counts_its_drafts_but_not_its_time() -> None:
    """Scenario 32: 2 tokens left in a round of K = 6."""
    arm = Candidate(6, 1)
    cut, whole = (forced(config_of(PLAIN, arm), [arm] * 40) for _ in range(2))
    for _ in range(40):
        plan = cut.plan(1)
        cut.observe(RoundFeedback(plan.plan_id, (2,), (2,), 0.002))
        plan = whole.plan(1)
        whole.observe(RoundFeedback(plan.plan_id, (6,), (6,), 0.002))
    assert cost_ms(cut, arm) == MS[arm]
    assert cost_ms(whole, arm) != MS[arm]
    assert cut.stats().invalid_feedback == 0
    assert count_trials((2,), (2,), 6) == ([1, 1], [1, 1])


def test_drafts_that_a_grammar_refused_are_no_trials() -> None:
    """Scenario 33: proposed 4, valid 1, accepted 1: one trial."""
    assert count_trials((1,), (1,), 4) == ([1], [1])
    assert count_trials((4,), (1,), 4) == ([1, 1], [1, 0])
