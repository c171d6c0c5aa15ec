"""Drives a policy over a trace, round by round, with sampled acceptance.

A request's accepted drafts come from one uniform number u: of K drafts of depth d it keeps as many
as there are s_i > u, so P(at least i kept) = s_i. The u of a request and round depend on the seed
alone, and so do noise, prefill and duplicates: two policies that are run with one seed meet the
same luck. What counts in a score are expected tokens and expected times of what the policy ran;
sampled ones are kept beside them.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from looped_spec.control.plan import (
    PLAIN,
    Candidate,
    RoundFeedback,
    ShadowCounts,
    SpeculationPlan,
)
from looped_spec.control.trace import PhaseNumbers, Trace, TracePhase

PREFILL_TOKENS = 256
"""Prompt tokens that a round with prefill says it computed."""

Clock = Callable[[], int]
"""Nanoseconds from some start, such as `time.perf_counter_ns`."""


class Policy(Protocol):
    """What the simulator drives; `AdaptiveController` is one."""

    def plan(
        self, batch_size: int, *, context_tokens: int = 0, new_requests: int = 0
    ) -> SpeculationPlan:
        """Return what the next round runs with `batch_size` decoding requests."""

    def observe(self, feedback: RoundFeedback) -> None:
        """Take note of what a round gave."""


CostTable = Sequence[Mapping[Candidate, float]]
"""For every phase, candidate -> milliseconds that the policy believes a round takes."""


@dataclass
class PhaseRun:
    """What a policy did in one phase; milliseconds are expected ones, without prefill.

    Attributes:
        rounds: rounds run.
        tokens: expected tokens of all requests.
        time_ms: expected time, with shadow readouts and resumptions.
        best_ms: time that the best candidate needs for as many tokens.
        plain_ms: time that plain decoding needs for as many tokens.
        sampled_tokens: tokens that were committed.
        sampled_ms: time with noise.
        probe_ms: time lost by probes and shadow readouts, part of `time_ms`.
        settled: first round from which 9 of 10 ran at 95 % of the best rate; `rounds` if none.
        flaps: changes of the held candidate from then on.
        switches: changes of the held candidate; probes leave it held.
        off_rounds: rounds without speculation.
        first_on: first round with speculation that was no probe; `rounds` if none.
    """

    rounds: int
    tokens: float = 0.0
    time_ms: float = 0.0
    best_ms: float = 0.0
    plain_ms: float = 0.0
    sampled_tokens: int = 0
    sampled_ms: float = 0.0
    probe_ms: float = 0.0
    settled: int = 0
    flaps: int = 0
    switches: int = 0
    off_rounds: int = 0
    first_on: int = 0


@dataclass
class Run:
    """What a policy did over a trace with one seed.

    Attributes:
        phases: phase by phase.
        decide_ns: duration of every `plan` call, if there was a clock.
        observe_ns: duration of every `observe` call, if there was a clock.
        plans: what every round ran, if asked for.
    """

    phases: list[PhaseRun]
    decide_ns: list[int] = field(default_factory=list)
    observe_ns: list[int] = field(default_factory=list)
    plans: list[SpeculationPlan] = field(default_factory=list)


def believed_costs(trace: Trace, seed: int) -> list[dict[Candidate, float]]:
    """Return the cost table that the policy is given: `table_ms` with the trace's `cost_error`.

    A cell that the same batch size and context length share has one error in all phases.
    """
    error = trace.cost_error
    draws = random.Random(f"{seed}:cost_error")
    factors: dict[tuple[int, int, Candidate], float] = {}
    tables = []
    for phase in trace.phases:
        table = {}
        for candidate in trace.candidates:
            key = (phase.batch_size, phase.context_tokens, candidate)
            if key not in factors:
                factors[key] = draws.lognormvariate(0.0, error.cell_deviation)
                factors[key] *= error.depths.get(candidate.draft_loops, 1.0)
                factors[key] *= error.cells.get(candidate, 1.0)
            table[candidate] = phase.table_ms[candidate] * factors[key]
        tables.append(table)
    return tables


class FixedPlans:
    """Runs one candidate per phase: never, static and oracle are of this kind."""

    def __init__(self, trace: Trace, candidates: Sequence[Candidate]) -> None:
        """Take one candidate for every phase of `trace`."""
        self._left = deque(
            (phase.rounds, candidate)
            for phase, candidate in zip(trace.phases, candidates, strict=True)
        )
        self._in_phase = 0
        self._next_id = 0

    @classmethod
    def static(cls, trace: Trace, candidate: Candidate) -> FixedPlans:
        """Run the same candidate in every round; plain decoding is `never`."""
        return cls(trace, [candidate] * len(trace.phases))

    @classmethod
    def oracle(cls, trace: Trace) -> FixedPlans:
        """Run the candidate of every phase that is truly best there."""
        return cls(trace, [phase.best() for phase in trace.phases])

    def plan(
        self, batch_size: int, *, context_tokens: int = 0, new_requests: int = 0
    ) -> SpeculationPlan:
        """Return the candidate of the phase that the round belongs to."""
        rounds, candidate = self._left[0]
        self._in_phase += 1
        if self._in_phase == rounds:
            self._left.popleft()
            self._in_phase = 0
        plan = SpeculationPlan(self._next_id, candidate)
        self._next_id += 1
        return plan

    def observe(self, feedback: RoundFeedback) -> None:
        """Learn nothing."""


class _Simulation:
    """One run; its state is what lies between two rounds."""

    def __init__(
        self, trace: Trace, policy: Policy, seed: int, clock: Clock | None, keep_plans: bool
    ) -> None:
        self.trace, self.policy, self.clock, self.keep_plans = trace, policy, clock, keep_plans
        self.run = Run([])
        self._draw = random.Random(f"{seed}:accept").random
        self._shadow_draw = random.Random(f"{seed}:shadow").random
        self._noise = random.Random(f"{seed}:noise")
        self._prefill_draw = random.Random(f"{seed}:prefill").random
        self._duplicate_draw = random.Random(f"{seed}:duplicate").random
        self._underway: deque[RoundFeedback] = deque()
        self._again: list[RoundFeedback] = []
        self._held: Candidate | None = None
        self._last_k = -1
        self._batch_size = 0

    def phase(self, phase: TracePhase) -> None:
        """Run the rounds of a phase."""
        numbers = phase.numbers
        result = PhaseRun(phase.rounds)
        batch_size = phase.batch_size
        new_requests = batch_size if phase.cohort_change else max(0, batch_size - self._batch_size)
        self._batch_size = batch_size
        good = bytearray(phase.rounds)
        changes = []
        first_on = -1
        draw = self._draw
        candidate, tokens, cost_ms = PLAIN, numbers.tokens[PLAIN], numbers.cost[PLAIN]
        for number in range(phase.rounds):
            plan = self._plan(phase, new_requests)
            new_requests = 0
            if plan.candidate is not candidate:
                candidate = plan.candidate
                tokens, cost_ms = numbers.tokens[candidate], numbers.cost[candidate]
            accepted = numbers.accepted(candidate, [draw() for _ in range(batch_size)])
            shadows = self._shadows(phase, numbers, plan, accepted) if plan.shadow_depths else ()
            shadow_ms = len(shadows) * (phase.shadow_ms or 0.0)
            time_ms = cost_ms + shadow_ms
            k = candidate.num_speculative_tokens
            if k and self._last_k == 0:
                time_ms += self.trace.resume_ms
            self._last_k = k

            result.tokens += tokens
            result.time_ms += time_ms
            result.probe_ms += shadow_ms
            result.off_rounds += k == 0
            good[number] = tokens >= 0.95 * numbers.best_rate * time_ms
            if k and not plan.probe and first_on < 0:
                first_on = number
            if plan.probe:
                lost_ms = time_ms - shadow_ms - tokens / numbers.rate(self._held)
                result.probe_ms += max(0.0, lost_ms)
            elif candidate is not self._held:
                if self._held is not None and candidate != self._held:
                    changes.append(number)
                self._held = candidate
            self._deliver(phase, plan, accepted, shadows, time_ms, result)
        result.best_ms = result.tokens / numbers.best_rate
        result.plain_ms = result.tokens / numbers.plain_rate
        result.settled = settled_from(good)
        result.first_on = first_on if first_on >= 0 else phase.rounds
        result.switches = len(changes)
        from_round = result.settled if result.settled < phase.rounds else 0
        result.flaps = sum(number > from_round for number in changes)
        self.run.phases.append(result)

    def _plan(self, phase: TracePhase, new_requests: int) -> SpeculationPlan:
        """Ask the policy, and measure how long it thinks."""
        start = self.clock() if self.clock else 0
        plan = self.policy.plan(
            phase.batch_size, context_tokens=phase.context_tokens, new_requests=new_requests
        )
        if self.clock:
            self.run.decide_ns.append(self.clock() - start)
        if self.keep_plans:
            self.run.plans.append(plan)
        return plan

    def _shadows(
        self,
        phase: TracePhase,
        numbers: PhaseNumbers,
        plan: SpeculationPlan,
        accepted: tuple[int, ...],
    ) -> tuple[ShadowCounts, ...]:
        """Sample what other depths would have chosen on the rows whose context was committed."""
        if phase.shadow_ms is None or not plan.shadow_depths:
            return ()
        found = []
        for depth in plan.shadow_depths:
            known = len(phase.requests[0].get(depth, ()))
            if known:
                rows = tuple([min(a + 1, known) for a in accepted])
                draws = [self._shadow_draw() for _ in accepted]
                kept = numbers.right(depth, plan.candidate, accepted, draws)
                found.append(ShadowCounts(depth, rows, tuple(map(min, kept, rows))))
        return tuple(found)

    def _deliver(
        self,
        phase: TracePhase,
        plan: SpeculationPlan,
        accepted: tuple[int, ...],
        shadows: tuple[ShadowCounts, ...],
        time_ms: float,
        result: PhaseRun,
    ) -> None:
        """Make the round's feedback and hand over what has arrived by now."""
        trace = self.trace
        if trace.cost_noise:
            time_ms *= self._noise.lognormvariate(-0.5 * trace.cost_noise**2, trace.cost_noise)
        result.sampled_tokens += phase.batch_size + sum(accepted)
        result.sampled_ms += time_ms
        prefill_tokens = 0
        if phase.mixed_prefill and self._prefill_draw() < phase.mixed_prefill:
            time_ms += phase.prefill_ms
            prefill_tokens = PREFILL_TOKENS
        k = plan.candidate.num_speculative_tokens
        feedback = RoundFeedback(
            plan.plan_id,
            (k,) * phase.batch_size,
            accepted,
            time_ms / 1000.0,
            num_prefill_tokens=prefill_tokens,
            shadow=shadows,
        )
        if not trace.feedback_delay and not trace.feedback_duplicates:
            self._observe(feedback)
            return
        self._underway.append(feedback)
        for repeated in self._again:
            self._observe(repeated)
        self._again.clear()
        if len(self._underway) > trace.feedback_delay:
            arrived = self._underway.popleft()
            self._observe(arrived)
            if self._duplicate_draw() < trace.feedback_duplicates:
                self._again.append(arrived)

    def _observe(self, feedback: RoundFeedback) -> None:
        if self.clock is None:
            self.policy.observe(feedback)
            return
        start = self.clock()
        self.policy.observe(feedback)
        self.run.observe_ns.append(self.clock() - start)


def settled_from(good: Sequence[int], window: int = 10, needed: int = 9) -> int:
    """Return the first good round from which `needed` of `window` are; how many there are if none.

    Of fewer rounds than the window all must be good.
    """
    window = min(window, len(good))
    needed = min(needed, window)
    inside = sum(good[:window])
    for first in range(len(good) - window + 1):
        if inside >= needed and good[first]:
            return first
        if first + window < len(good):
            inside += good[first + window] - good[first]
    return len(good)


def simulate(
    trace: Trace,
    policy: Policy,
    seed: int,
    *,
    clock: Clock | None = None,
    keep_plans: bool = False,
) -> Run:
    """Run a fresh policy over a trace; the same seed gives the same run."""
    simulation = _Simulation(trace, policy, seed, clock, keep_plans)
    for phase in trace.phases:
        simulation.phase(phase)
    return simulation.run
