"""Scenarios 13 and 39: what lies exactly on a threshold stays, and deciding is little work."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from control_bench.landscapes import ARMS, phase
from control_bench.timing import controller_costs

from looped_spec.control.config import AdaptiveSpecConfig, BatchBucket
from looped_spec.control.controller import AdaptiveController
from looped_spec.control.plan import Candidate, RoundFeedback
from looped_spec.control.trace import Trace
from looped_spec.control.trace_config import trace_config

LADDER = (Candidate(2, 1), Candidate(4, 1), Candidate(8, 1))


def play(controller: AdaptiveController, accepted: Callable[[int], int], rounds: int) -> Candidate:
    """Run rounds of 4 requests that accept `accepted(K)` drafts; return what runs then."""
    for _ in range(rounds):
        plan = controller.plan(4)
        k = plan.candidate.num_speculative_tokens
        controller.observe(RoundFeedback(plan.plan_id, (k,) * 4, (accepted(k),) * 4, 0.01))
    return controller.plan(4).candidate


@pytest.mark.parametrize(
    ("accepted", "runs"),
    [
        (lambda k: 3 * k // 4, Candidate(4, 1)),  # exactly `up`
        (lambda k: k, Candidate(8, 1)),
        (lambda k: k // 4, Candidate(4, 1)),  # exactly `down`
        (lambda k: 0, Candidate(2, 1)),
        (lambda k: k // 2, Candidate(4, 1)),
    ],
)
def test_ema_moves_beyond_a_threshold_and_not_at_it(
    accepted: Callable[[int], int], runs: Candidate
) -> None:
    """Scenario 13; shares of powers of 2 are exact, and so is their average."""
    bucket = BatchBucket(1, 8, LADDER, 1, up=(0.75,) * 3, down=(0.25,) * 3)
    controller = AdaptiveController(
        AdaptiveSpecConfig(4, (bucket,), "ema", ema_beta=0.5, warmup_rounds=1, interval=4)
    )
    assert play(controller, accepted, 40) == runs


def test_static_stays_whatever_is_accepted() -> None:
    """Scenario 13."""
    bucket = BatchBucket(1, 8, LADDER, 1)
    controller = AdaptiveController(AdaptiveSpecConfig(4, (bucket,), "static"))
    for share in (0, 1):
        assert play(controller, lambda k, share=share: share * k, 40) == LADDER[1]  # type: ignore[misc]


def calls(controller: AdaptiveController, batch_size: int, rounds: int) -> tuple[Counter[str], int]:
    """Return the Python functions that `plan` and `observe` call, with the rounds they did so in,
    and the most calls of one round."""
    count, most = Counter[str](), 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            made[frame.f_code.co_name] += 1

    for number in range(rounds):
        made: Counter[str] = Counter()
        sys.setprofile(note)
        plan = controller.plan(batch_size, context_tokens=512)
        sys.setprofile(None)
        k = plan.candidate.num_speculative_tokens
        accepted = tuple((3 * number + 5 * i) % (k + 1) for i in range(batch_size))
        feedback = RoundFeedback(plan.plan_id, (k,) * batch_size, accepted, 0.005)
        sys.setprofile(note)
        controller.observe(feedback)
        sys.setprofile(None)
        count.update(made)
        most = max(most, made.total())
    return count, most


@pytest.mark.parametrize("policy", ["static", "ema", "goodput"])
def test_a_round_is_decided_with_few_calls_whatever_the_batch_size(policy: str) -> None:
    """Scenario 39 without a clock, which a test may not rely on: the work of a usual round.

    A call of a small Python function takes some tenths of a microsecond. What the whole takes is
    measured by the benchmark.
    """
    usual = {}
    for batch_size in (1, 32):
        trace = Trace(4, ARMS, (phase(batch_size, (0.7, 0.8, 0.9)),))
        name = "goodput" if policy == "static" else policy
        config = trace_config(trace, name)
        if policy == "static":
            config = AdaptiveSpecConfig.pinned(Candidate(2, 1), 4, 32)
        controller = AdaptiveController(config)
        calls(controller, batch_size, 200)
        found, _ = calls(controller, batch_size, 300)
        usual[batch_size] = found.total() / 300
    assert usual[1] < 40
    assert usual[32] < 60


def test_the_benchmark_tells_time_and_memory_of_every_batch_size() -> None:
    found = controller_costs("goodput", 50)
    assert list(found) == ["1", "8", "32", "256"]
    for row in found.values():
        assert 0 < row["decide_us_p50"] <= row["decide_us_p99"]
        assert 0 < row["feedback_us_p50"] <= row["feedback_us_p99"]
        assert row["decide_bytes_p50"] < 10_000
