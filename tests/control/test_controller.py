"""The controller around a policy: buckets, plan ids, feedback, ranks, and what it tells."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from looped_spec.control.config import AdaptiveSpecConfig, BatchBucket
from looped_spec.control.controller import MAX_PENDING, STAY_ROUNDS, AdaptiveController
from looped_spec.control.plan import PLAIN, Candidate, RoundFeedback, SpeculationPlan
from looped_spec.control.static import StaticPolicy
from looped_spec.errors import ConfigError

SMALL, LARGE = Candidate(4, 1), Candidate(1, 1)


def pinned_by_bucket(**options: Any) -> AdaptiveController:
    """Return one that runs K = 4 up to batch size 4 and K = 1 above."""
    buckets = (BatchBucket(1, 4, (SMALL,)), BatchBucket(5, 16, (LARGE,)))
    return AdaptiveController(AdaptiveSpecConfig(4, buckets, "static", **options))


def answer(plan: SpeculationPlan, batch_size: int, accepted: int = 1) -> RoundFeedback:
    """Return the feedback of a round where every request kept at most `accepted` drafts."""
    k = plan.candidate.num_speculative_tokens
    return RoundFeedback(plan.plan_id, (k,) * batch_size, (min(k, accepted),) * batch_size, 0.005)


def test_a_larger_bucket_is_entered_at_once_and_a_smaller_one_only_for_good() -> None:
    target = pinned_by_bucket()
    sizes = [4, 5] + [4] * (STAY_ROUNDS + 2) + [5, 3]
    ran = [target.plan(size).candidate for size in sizes]
    assert ran[:2] == [SMALL, LARGE]
    assert ran[2 : 2 + STAY_ROUNDS] == [LARGE] * STAY_ROUNDS
    assert ran[2 + STAY_ROUNDS] == SMALL
    assert ran[-2:] == [LARGE, SMALL], "2 beyond the edge there is no waiting"


def test_no_plan_needs_more_rows_than_were_asked_for() -> None:
    target = pinned_by_bucket()
    for size in [4, 5, 4, 4, 16, 15, 4, 1, 5, 4]:
        rows = size * (target.plan(size).candidate.num_speculative_tokens + 1)
        assert rows <= target.config.max_rows


def test_plans_that_are_never_answered_are_given_up() -> None:
    target = pinned_by_bucket()
    plans = [target.plan(1) for _ in range(MAX_PENDING + 10)]
    for plan in plans:
        target.observe(answer(plan, 1))
    stats = target.stats()
    assert (stats.feedback, stats.stale_feedback) == (MAX_PENDING, 10)


def test_feedback_that_contradicts_itself_is_counted_and_teaches_nothing() -> None:
    for policy in ("static", "ema", "goodput"):
        target = AdaptiveController(AdaptiveSpecConfig.default(4, 8, policy=policy))
        before = target.state_dict()["learnt"]
        for proposed, accepted in (((1,), (2,)), ((1, 1), (1,)), ((1,), (-1,)), ((9,), (9,))):
            plan = target.plan(1)
            target.observe(RoundFeedback(plan.plan_id, proposed, accepted, 0.005))
        assert target.stats().invalid_feedback == 4
        after = target.state_dict()["learnt"]
        if policy == "goodput":  # asking for plans alone lets doubts of other depths grow
            for key in ("weight", "hits", "trials"):
                assert before["acceptance"][key] == after["acceptance"][key]
            assert before["acceptance"]["levels"]["means"] == after["acceptance"]["levels"]["means"]
        if policy == "ema":
            for ours, theirs in zip(before["buckets"], after["buckets"], strict=True):
                assert (ours["ema"], ours["rounds"]) == (theirs["ema"], theirs["rounds"])


def test_the_agreed_candidate_runs_and_is_no_probe() -> None:
    votes: list[int] = []

    def lowest(vote: int) -> int:
        votes.append(vote)
        return 0

    target = AdaptiveController(AdaptiveSpecConfig.default(4, 8), consensus=lowest)
    for _ in range(100):
        plan = target.plan(2)
        assert plan.candidate == PLAIN
        assert not plan.probe
        target.observe(answer(plan, 2))
    assert any(votes)


def test_a_consensus_outside_the_list_is_an_error() -> None:
    target = AdaptiveController(AdaptiveSpecConfig.default(4, 8), consensus=lambda vote: 99)
    with pytest.raises(ConfigError, match="consensus"):
        target.plan(1)


def test_runs_of_equal_plans_are_one_entry_of_the_history() -> None:
    target = pinned_by_bucket()
    for size in [1] * 5 + [16] * 3:
        target.plan(size)
    stats = target.stats()
    assert [(run.candidate, run.rounds) for run in stats.history] == [(SMALL, 5), (LARGE, 3)]
    assert [(s.plan_id, s.previous, s.candidate) for s in stats.switches] == [(5, SMALL, LARGE)]
    assert stats.plans == sum(run.rounds for run in stats.history)


@pytest.mark.parametrize("policy", ["static", "ema", "goodput"])
def test_what_is_told_is_json_and_can_be_read(policy: str) -> None:
    target = AdaptiveController(AdaptiveSpecConfig.default(4, 8, policy=policy))
    for _ in range(20):
        target.observe(answer(target.plan(3), 3))
    told = json.loads(json.dumps(target.explain().as_dict()))
    assert [bucket["is_active"] for bucket in told["buckets"]].count(True) == 1
    json.dumps(target.stats().as_dict(), allow_nan=False)
    json.dumps(target.state_dict(), allow_nan=False)
    assert f"policy {policy}" in str(target.explain())
    assert "\n" not in target.explain().line


@pytest.mark.parametrize("policy", ["static", "ema", "goodput"])
def test_a_controller_goes_on_from_a_saved_state_as_the_one_that_saved_it(policy: str) -> None:
    first = AdaptiveController(AdaptiveSpecConfig.default(4, 8, policy=policy))
    for number in range(150):
        first.observe(answer(first.plan(1 + number // 30), 1 + number // 30, number % 3))
    second = AdaptiveController(AdaptiveSpecConfig.default(4, 8, policy=policy))
    saved = json.loads(json.dumps(first.state_dict()))
    second.load_state_dict(saved)
    first.load_state_dict(saved)  # what is in flight is no part of a state
    for number in range(150):
        plans = [target.plan(4) for target in (first, second)]
        assert plans[0] == plans[1]
        for target, plan in zip((first, second), plans, strict=True):
            target.observe(answer(plan, 4, number % 4))


def test_control_needs_nothing_but_the_standard_library() -> None:
    program = (
        "import sys\n"
        "from looped_spec.control.controller import AdaptiveController\n"
        "from looped_spec.control.config import AdaptiveSpecConfig\n"
        "AdaptiveController(AdaptiveSpecConfig.default(8, 4)).plan(1)\n"
        "print(sorted({'torch', 'numpy', 'pluggy'} & set(sys.modules)))\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (found.returncode, found.stdout.strip()) == (0, "[]"), found.stderr


def test_the_policy_static_runs_the_same_with_a_controller_and_without() -> None:
    buckets = (
        BatchBucket(1, 4, (PLAIN, Candidate(2, 1)), 1),
        BatchBucket(5, 8, (PLAIN, Candidate(1, 1))),
    )
    config = AdaptiveSpecConfig(4, buckets, "static")
    alone, controlled = StaticPolicy.of(config), AdaptiveController(config)
    for batch_size in (1, 4, 5, 8, 99):
        wanted = buckets[batch_size > 4]
        candidate = wanted.candidates[wanted.initial]
        assert alone.plan(batch_size).candidate == candidate
        assert controlled.plan(batch_size).candidate == candidate
    assert alone.candidate == controlled.plan(1).candidate
    one = StaticPolicy(Candidate(3, 2))
    assert {one.plan(batch_size).candidate for batch_size in (1, 9999)} == {Candidate(3, 2)}
