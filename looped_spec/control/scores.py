"""What several runs say of a policy: means over seeds, each with its interval."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from looped_spec.control.simulate import PhaseRun, Run

RESAMPLES = 1000
"""Bootstrap resamples of the seeds behind an interval."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and the ends of its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Return the mean with its percentile bootstrap interval; one value has no spread."""
        mean = math.fsum(values) / len(values)
        if min(values) == max(values):
            return cls(mean, mean, mean)
        choices = random.Random(0)  # The same resamples for all, so that a report is reproducible.
        means = sorted(
            math.fsum(choices.choices(values, k=len(values))) / len(values)
            for _ in range(RESAMPLES)
        )
        return cls(mean, means[round(0.025 * RESAMPLES)], means[round(0.975 * RESAMPLES) - 1])


def regret(phases: Sequence[PhaseRun]) -> float:
    """Return expected time / time of the best candidate of each phase for as many tokens - 1."""
    return _ratio_less_1(sum(p.time_ms for p in phases), sum(p.best_ms for p in phases))


def sampled_regret(phases: Sequence[PhaseRun]) -> float:
    """Return the regret of the tokens that were sampled, in the time with noise that they took."""
    best = sum(p.sampled_tokens * p.best_ms / p.tokens for p in phases)
    return _ratio_less_1(sum(p.sampled_ms for p in phases), best)


def slowdown(phases: Sequence[PhaseRun]) -> float:
    """Return expected time / time of plain decoding for as many tokens - 1; below 0 is a gain."""
    return _ratio_less_1(sum(p.time_ms for p in phases), sum(p.plain_ms for p in phases))


def worst_slowdown(phases: Sequence[PhaseRun]) -> float:
    """Return the slowdown of the phase where it is highest."""
    return max(slowdown([phase]) for phase in phases)


def probe_tax(phases: Sequence[PhaseRun]) -> float:
    """Return the share of time lost by probes and shadow readouts."""
    return sum(p.probe_ms for p in phases) / sum(p.time_ms for p in phases)


def flaps_per_1000(phases: Sequence[PhaseRun]) -> float:
    """Return changes of the held candidate per 1000 rounds, of rounds in settled phases."""
    rounds = sum(p.rounds - (p.settled if p.settled < p.rounds else 0) for p in phases)
    return 1000 * sum(p.flaps for p in phases) / rounds


def switches(phases: Sequence[PhaseRun]) -> int:
    """Return how often the held candidate changed."""
    return sum(p.switches for p in phases)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that a share of 0..1 of all is below, nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def result_document(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the scores of runs with different seeds, as `looped-spec simulate --json` prints them.

    The runs must have been made with a clock that counts nanoseconds.
    """
    phases = [run.phases for run in runs]
    decide_us = [[ns / 1000 for ns in run.decide_ns] for run in runs]
    found: Mapping[str, Any] = {
        "regret": Estimate.of([regret(p) for p in phases]),
        "slowdown_vs_never": {
            "mean": Estimate.of([slowdown(p) for p in phases]),
            "worst_phase": Estimate.of([worst_slowdown(p) for p in phases]),
        },
        "rounds_to_95": [
            Estimate.of([phase.settled for phase in same]) for same in zip(*phases, strict=True)
        ],
        "flaps_per_1000": Estimate.of([flaps_per_1000(p) for p in phases]),
        "probe_tax": Estimate.of([probe_tax(p) for p in phases]),
        "switches": Estimate.of([switches(p) for p in phases]),
        "decide_us": {
            "p50": Estimate.of([percentile(us, 0.5) for us in decide_us]),
            "p99": Estimate.of([percentile(us, 0.99) for us in decide_us]),
        },
    }
    return {key: _plain(value) for key, value in found.items()}


def _ratio_less_1(time_ms: float, reference_ms: float) -> float:
    """Return the excess, free of what is only the rounding of the sums, so that 0 is 0."""
    return round(time_ms / reference_ms - 1, 12) + 0.0


def _plain(value: Any) -> Any:
    if isinstance(value, Estimate):
        return asdict(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value]
