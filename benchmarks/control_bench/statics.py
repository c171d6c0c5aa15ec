"""Policies that never change their mind have a regret in closed form."""

from __future__ import annotations

from collections.abc import Iterable

from looped_spec.control.plan import Candidate
from looped_spec.control.trace import Trace


def static_times(trace: Trace, candidate: Candidate) -> tuple[float, float]:
    """Return (ms, ms of the best candidates for as many tokens) of one candidate over a trace."""
    time = best = 0.0
    for phase in trace.phases:
        ms = phase.rounds * phase.cost_ms[candidate]
        time += ms
        best += ms * phase.rate(candidate) / phase.rate(phase.best())
    return time, best


def static_regret(trace: Trace, candidate: Candidate) -> float:
    """Return the regret of one candidate over a trace."""
    time, best = static_times(trace, candidate)
    return time / best - 1


def best_static(traces: Iterable[Trace]) -> tuple[Candidate, float]:
    """Return the candidate with the lowest mean regret over traces that all have it, and that."""
    listed = list(traces)
    common = [c for c in listed[0].candidates if all(c in t.candidates for t in listed)]
    means = {c: sum(static_regret(t, c) for t in listed) / len(listed) for c in common}
    best = min(means, key=lambda c: means[c])
    return best, means[best]
