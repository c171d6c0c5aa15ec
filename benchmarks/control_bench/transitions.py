"""What changes from one phase of a trace to the next, and how soon a policy copes with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from control_bench.measure import Runs
from control_bench.suites import suite
from looped_spec.control.plan import PLAIN
from looped_spec.control.scores import percentile
from looped_spec.control.trace import Trace

KINDS = ("batch change", "acceptance change", "off to on")


def transitions(trace: Trace) -> list[tuple[int, str, int]]:
    """Return (phase, kind, batch size) for every phase but the first that has one of `KINDS`.

    A change of acceptance counts as "off to on" where plain decoding was best before and is not
    now, a change of both acceptance and batch size only as that, else as nothing.
    """
    found = []
    for number, (before, now) in enumerate(zip(trace.phases, trace.phases[1:], strict=False), 1):
        batch = before.batch_size != now.batch_size
        acceptance = before.requests != now.requests
        if before.best() == PLAIN and now.best() != PLAIN and acceptance:
            kind = "off to on"
        elif batch and not acceptance:
            kind = "batch change"
        elif acceptance and not batch:
            kind = "acceptance change"
        else:
            continue
        found.append((number, kind, now.batch_size))
    return found


def rounds_to_95(
    found: Mapping[str, Runs], suites: Sequence[str], scale: float
) -> dict[tuple[str, bool], list[int]]:
    """Return (kind, B = 1) -> rounds to 95 % of every such phase and seed of the suites."""
    rounds: dict[tuple[str, bool], list[int]] = {}
    for name in suites:
        for trace in suite(name, scale):
            runs = found[name][trace.name]
            for number, kind, batch_size in transitions(trace):
                key = kind, batch_size == 1
                rounds.setdefault(key, []).extend(phases[number].settled for phases in runs)
    return rounds


def summary(rounds: Sequence[int]) -> dict[str, float]:
    """Return median, 95th percentile, mean and count; of no rounds an empty summary."""
    if not rounds:
        return {"count": 0}
    return {
        "p50": percentile(rounds, 0.5),
        "p95": percentile(rounds, 0.95),
        "mean": sum(rounds) / len(rounds),
        "count": len(rounds),
    }
