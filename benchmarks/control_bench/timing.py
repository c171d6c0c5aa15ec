"""How long the controller itself takes, and what it allocates."""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from bisect import bisect_left
from typing import Any

from control_bench.landscapes import ARMS, FULL_LOOPS, A, phase, survival
from looped_spec.control.controller import AdaptiveController
from looped_spec.control.plan import RoundFeedback, SpeculationPlan
from looped_spec.control.scores import percentile
from looped_spec.control.trace import Trace
from looped_spec.control.trace_config import trace_config

BATCH_SIZES = (1, 8, 32, 256)
WARM_UP_ROUNDS = 500


def controller_costs(policy: str, rounds: int = 4000) -> dict[str, dict[str, float]]:
    """Return for every batch size p50 and p99 in us of plan and observe, and bytes they allocate.

    Acceptance is that of landscape A, middling; the time of reading the clock is taken off.
    """
    return {str(b): _costs(policy, b, rounds) for b in BATCH_SIZES}


class _Engine:
    """Runs rounds of a fixed load."""

    def __init__(self, policy: str, batch_size: int) -> None:
        load = phase(batch_size, A["middling"])
        self.trace = Trace(FULL_LOOPS, ARMS, (load,))
        self.controller = AdaptiveController(trace_config(self.trace, policy))
        self.batch_size = batch_size
        self.cost = load.cost_ms
        self.negated = {d: [-s for s in chain] for d, chain in survival(A["middling"]).items()}
        self.draw = random.Random(0).random

    def plan(self) -> SpeculationPlan:
        return self.controller.plan(self.batch_size, context_tokens=512)

    def feedback(self, plan: SpeculationPlan) -> RoundFeedback:
        k, d = plan.candidate.num_speculative_tokens, plan.candidate.draft_loops
        accepted = tuple(
            bisect_left(self.negated[d], -self.draw(), 0, k) if k else 0
            for _ in range(self.batch_size)
        )
        seconds = self.cost[plan.candidate] / 1000 * (0.98 + 0.04 * self.draw())
        return RoundFeedback(plan.plan_id, (k,) * self.batch_size, accepted, seconds)


def _costs(policy: str, batch_size: int, rounds: int) -> dict[str, float]:
    engine = _Engine(policy, batch_size)
    decide, feed = [], []
    clock = time.perf_counter_ns
    empty = sorted(_gap(clock) for _ in range(1000))[500]
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for number in range(WARM_UP_ROUNDS + rounds):
            start = clock()
            plan = engine.plan()
            middle = clock()
            feedback = engine.feedback(plan)
            again = clock()
            engine.controller.observe(feedback)
            end = clock()
            if number >= WARM_UP_ROUNDS:
                decide.append((middle - start - empty) / 1000)
                feed.append((end - again - empty) / 1000)
    finally:
        if was_enabled:
            gc.enable()
    return {
        "decide_us_p50": percentile(decide, 0.5),
        "decide_us_p99": percentile(decide, 0.99),
        "feedback_us_p50": percentile(feed, 0.5),
        "feedback_us_p99": percentile(feed, 0.99),
        **_allocated(engine),
    }


def _gap(clock: Any) -> int:
    start = clock()
    return int(clock() - start)


def _allocated(engine: _Engine, rounds: int = 200) -> dict[str, float]:
    """Return the median of the most bytes that a call holds beyond what was held before it."""
    decide, feed = [], []
    tracemalloc.start()
    try:
        for _ in range(rounds):
            before = _now()
            plan = engine.plan()
            decide.append(tracemalloc.get_traced_memory()[1] - before)
            feedback = engine.feedback(plan)
            before = _now()
            engine.controller.observe(feedback)
            feed.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    return {
        "decide_bytes_p50": percentile(decide, 0.5),
        "feedback_bytes_p50": percentile(feed, 0.5),
    }


def _now() -> int:
    tracemalloc.reset_peak()
    return tracemalloc.get_traced_memory()[0]
