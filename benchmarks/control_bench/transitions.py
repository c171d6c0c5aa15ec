"""What changes from one phase of a trace to the next, and how soon a policy copes with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
) -> dict[tuple[str, bool], list[list[int]]]:
    """Return (kind, B = 1) -> for every seed, rounds to 95 % of each such phase of the suites."""
    rounds: dict[tuple[str, bool], list[list[int]]] = {}
    for name in suites:
        for trace in suite(name, scale):
            runs = found[name][trace.name]
            for number, kind, batch_size in transitions(trace):
                key = kind, batch_size == 1
                of_seeds = rounds.setdefault(key, [[] for _ in runs])
                for seen, phases in zip(of_seeds, runs, strict=True):
                    seen.append(phases[number].settled)
    return rounds


def of_all(share: float) -> Callable[[Sequence[Sequence[int]]], float]:
    """Return what takes a percentile over the phases of all seeds."""
    return lambda seeds: percentile([rounds for seen in seeds for rounds in seen], share)


def summary(seeds: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return median, 95th percentile, mean and count over the phases of all seeds."""
    rounds = [value for seen in seeds for value in seen]
    return {
        "p50": of_all(0.5)(seeds),
        "p95": of_all(0.95)(seeds),
        "mean": sum(rounds) / len(rounds),
        "count": len(rounds),
    }
