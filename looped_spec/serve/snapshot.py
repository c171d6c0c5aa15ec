"""A copy of what the engine counts, taken between two steps, for others to read at leisure."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from looped_spec.control.controller import AdaptiveController
from looped_spec.control.explain import Explanation
from looped_spec.control.plan import Candidate
from looped_spec.control.stats import ControllerStats
from looped_spec.runtime.outputs import SpeculationMetrics
from looped_spec.runtime.prefix_cache import PrefixCacheStats

if TYPE_CHECKING:
    from looped_spec.runtime.llm import LLM


@dataclass(frozen=True)
class EngineSnapshot:
    """The engine's counts at one moment.

    Attributes:
        seconds: the moment, on the monotonic clock.
        num_running: requests that hold memory, prefilling or decoding.
        num_waiting: requests that wait for it.
        metrics: a copy of the counts of all rounds since the start.
        candidate: the (K, d) of the newest round, None before the first of a controller.
        explanation: what each batch bucket runs and why.
        controller: counts of the controller, where there is one.
        prefix_cache: prompt tokens looked up and found, where prompts are kept.
        failed_answers: answers that ended by a fault of ours since the last that did not.
    """

    seconds: float
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_preemptions: int
    metrics: SpeculationMetrics
    candidate: Candidate | None
    explanation: Explanation
    controller: ControllerStats | None
    prefix_cache: PrefixCacheStats | None = None
    failed_answers: int = 0


def take_snapshot(llm: LLM, failed_answers: int = 0) -> EngineSnapshot:
    """Copy the counts; only for the thread that steps the engine."""
    scheduler = llm.engine.scheduler
    prefixes = scheduler.prefix_cache
    metrics = SpeculationMetrics()
    metrics.add(llm.engine.metrics)
    policy = llm.engine.policy
    stats = policy.stats() if isinstance(policy, AdaptiveController) else None
    if stats is None:
        candidate: Candidate | None = llm.speculation
    else:
        candidate = stats.history[-1].candidate if stats.history else None
    return EngineSnapshot(
        seconds=time.monotonic(),
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_blocks=scheduler.allocator.num_blocks,
        num_free_blocks=scheduler.allocator.num_free,
        num_preemptions=scheduler.num_preemptions,
        metrics=metrics,
        candidate=candidate,
        explanation=llm.explain(),
        controller=stats,
        prefix_cache=dataclasses.replace(prefixes) if prefixes else None,
        failed_answers=failed_answers,
    )
