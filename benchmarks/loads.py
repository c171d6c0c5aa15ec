"""Loads that keep an engine busy with a given number of requests, and what a run of one gives.

A load is closed: whenever a request ends the next one starts, so that the batch size is what the
load says. The requests and their order are the same whatever speculation does, so times of two runs
compare.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from looped_spec.runtime.engine import Engine
from looped_spec.runtime.outputs import SpeculationMetrics
from looped_spec.runtime.request import Request
from looped_spec.sampling_params import SamplingParams

RAMP = (1, 8, 32, 8, 1)


@dataclass(frozen=True)
class Stage:
    """Start so many requests, keeping `concurrency` of them running."""

    concurrency: int
    num_requests: int


@dataclass(frozen=True)
class Load:
    """Stages, one after the other; the last one's requests run to their end."""

    name: str
    stages: tuple[Stage, ...]

    @classmethod
    def of(cls, name: str, requests_each: int) -> Load:
        """Make a load of its name: a batch size, or "ramp". `requests_each` is how many requests
        every place of the batch has, one after the other."""
        sizes = RAMP if name == "ramp" else (int(name),)
        return cls(name, tuple(Stage(size, size * requests_each) for size in sizes))

    @property
    def num_requests(self) -> int:
        """How many prompts it takes."""
        return sum(stage.num_requests for stage in self.stages)

    @property
    def max_concurrency(self) -> int:
        """The largest batch."""
        return max(stage.concurrency for stage in self.stages)


@dataclass(frozen=True)
class LoadRun:
    """A run of a load: `stage_seconds` are from a stage's first start to the next one's."""

    seconds: float
    stage_seconds: list[float]
    metrics: SpeculationMetrics
    token_ids: list[list[int]]

    @property
    def tokens_per_second(self) -> float:
        """New tokens by seconds, prefill included."""
        return sum(map(len, self.token_ids)) / self.seconds


def drive(
    engine: Engine, load: Load, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> LoadRun:
    """Run a load, its prompts in their order; the seed of each request is its number."""
    requests: list[Request] = []
    source = itertools.count()
    running = 0
    starts = [time.perf_counter()]
    for stage in load.stages:
        left = stage.num_requests
        while left:
            while left and running < stage.concurrency:
                number = next(source)
                requests.append(engine.add_request(prompts[number], _seeded(params, number)))
                running, left = running + 1, left - 1
            running -= _step(engine)
        starts.append(time.perf_counter())
    while running:
        running -= _step(engine)
    end = time.perf_counter()
    starts[-1] = end
    metrics = SpeculationMetrics()
    for request in requests:
        metrics.add(request.metrics)
    return LoadRun(
        end - starts[0],
        [b - a for a, b in itertools.pairwise(starts)],
        metrics,
        [request.output_token_ids for request in requests],
    )


def _step(engine: Engine) -> int:
    """Run a step and return how many requests ended in it."""
    return sum(request.finish_reason is not None for request in engine.step())


def _seeded(params: SamplingParams, seed: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        ignore_eos=params.ignore_eos,
        seed=seed,
    )
