"""Runs a load on an engine and keeps when every token came."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.offline.load import Profile
from looped_spec.runtime.engine import Engine
from looped_spec.runtime.outputs import SpeculationMetrics
from looped_spec.runtime.request import Request
from looped_spec.sampling_params import SamplingParams

Clock = Callable[[], float]
RoundMs = Callable[[int, float, Candidate], float]


class Step(NamedTuple):
    """One step of the engine: when it ended, in seconds of the clock, what it ran and gave.

    `batch_size` is how many requests its round decoded; 0 if it only computed prompts, and
    `candidate` is then that of the round before. `context_tokens` is their context, as what chooses
    (K, d) was told. `ran` is what ran of the candidate: less where all were about to end.
    """

    end: float
    candidate: Candidate
    batch_size: int
    num_tokens: int
    context_tokens: int = 0
    ran: Candidate | None = None


@dataclass
class Served:
    """When a request was added and when its tokens came, in seconds of the clock.

    `gaps` are the seconds between two steps that gave it tokens, as a client would see them.
    """

    added: float
    first: float | None = None
    last: float = 0.0
    num_tokens: int = 0
    gaps: list[float] = field(default_factory=list)

    def note(self, now: float, num_tokens: int) -> int:
        """Note that it has `num_tokens` tokens now, and return how many are new."""
        new = num_tokens - self.num_tokens
        if new:
            if self.first is None:
                self.first = now
            else:
                self.gaps.append(now - self.last)
            self.last, self.num_tokens = now, num_tokens
        return new


@dataclass(frozen=True)
class LoadRun:
    """A run of a load.

    Attributes:
        start: when the first request was added, in seconds of the clock.
        phase_starts: when each phase began: with its first request, or where that has to wait for
            requests of the phase before, when the wait began.
        steps: all steps of the engine, in their order.
        served: one for each request, in the order in which they started.
        metrics: the speculation counts of all requests.
        token_ids: what each request generated.
        num_input_tokens: prompt tokens of all requests.
    """

    start: float
    phase_starts: list[float]
    steps: list[Step]
    served: list[Served]
    metrics: SpeculationMetrics
    token_ids: list[list[int]]
    num_input_tokens: int

    @property
    def seconds(self) -> float:
        """From the first request to the last token."""
        return self.steps[-1].end - self.start

    @property
    def phase_seconds(self) -> list[float]:
        """From the begin of each phase to that of the next, and to the end."""
        ends = [*self.phase_starts[1:], self.steps[-1].end]
        return [end - start for start, end in zip(self.phase_starts, ends, strict=True)]

    @property
    def num_output_tokens(self) -> int:
        """New tokens of all requests."""
        return sum(map(len, self.token_ids))

    def table_seconds(self, ms: RoundMs) -> float:
        """Return what all rounds take by a table of costs, prompts left out: `ms` says it, for a
        batch size, a context and a candidate."""
        rounds = [step for step in self.steps if step.batch_size]
        return sum(ms(r.batch_size, r.context_tokens, r.ran or r.candidate) for r in rounds) / 1e3

    def off_share(self) -> float:
        """Return the share of the time of rounds that went by with K = 0."""
        off = total = 0.0
        before = self.start
        for step in self.steps:
            if step.batch_size:
                total += step.end - before
                off += step.end - before if step.candidate == PLAIN else 0.0
            before = step.end
        return off / total if total else 0.0


def drive(
    engine: Engine,
    profile: Profile,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    clock: Clock = time.perf_counter,
) -> LoadRun:
    """Run a load, its prompts in their order; the seed of request n is that of `params` plus n.

    What is unfinished is dropped from the engine if anything fails, Ctrl-C included.
    """
    *_, run = paced(engine, profile, prompts, params, clock=clock)
    assert isinstance(run, LoadRun)  # it is the last
    return run


def paced(
    engine: Engine,
    profile: Profile,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    clock: Clock,
) -> Generator[int | LoadRun]:
    """Run a load like `drive`, yielding after each step how many tokens there are, and at the end
    what was measured.

    Closing it before drops what is unfinished.
    """
    run = _Run(engine, clock)
    try:
        for phase in profile.phases:
            left = phase.num_requests
            run.phase_starts.append(clock())
            while left or (profile.drains and run.running):
                while left and run.running < phase.concurrency:
                    number = len(run.requests)
                    seeded = dataclasses.replace(params, seed=(params.seed or 0) + number)
                    run.add(prompts[number], seeded)
                    left -= 1
                run.step()
                yield run.num_tokens
        while run.running:
            run.step()
            yield run.num_tokens
    except BaseException:
        engine.drop([request for request in run.requests if request.finish_reason is None])
        raise
    yield run.result()


class _Run:
    """A load in the middle: what has been started, and what came of it."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine, self._clock = engine, clock
        self._rounds = engine.metrics.num_rounds
        self._served: dict[int, Served] = {}
        self._steps: list[Step] = []
        self.requests: list[Request] = []
        self.phase_starts: list[float] = []
        self.running = self.num_tokens = 0

    def add(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Queue a request."""
        request = self._engine.add_request(prompt, params)
        self.requests.append(request)
        self._served[request.request_id] = Served(self._clock())
        self.running += 1

    def step(self) -> None:
        """Run a step of the engine and note what came."""
        engine = self._engine
        touched = engine.step()
        now = self._clock()
        tokens = 0
        for request in touched:
            tokens += self._served[request.request_id].note(now, len(request.output_token_ids))
            self.running -= request.finish_reason is not None
        rounds = engine.metrics.num_rounds
        candidate = engine.newest_candidate or PLAIN
        self.num_tokens += tokens
        decoded = rounds - self._rounds
        ran = engine.newest_submitted or candidate
        self._steps.append(Step(now, candidate, decoded, tokens, engine.newest_context, ran))
        self._rounds = rounds

    def result(self) -> LoadRun:
        """Return everything that was noted."""
        metrics = SpeculationMetrics()
        for request in self.requests:
            metrics.add(request.metrics)
        served = [self._served[request.request_id] for request in self.requests]
        return LoadRun(
            start=served[0].added if served else self._clock(),
            phase_starts=self.phase_starts,
            steps=self._steps,
            served=served,
            metrics=metrics,
            token_ids=[request.output_token_ids for request in self.requests],
            num_input_tokens=sum(len(request.prompt_token_ids) for request in self.requests),
        )
