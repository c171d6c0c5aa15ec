"""From the runs of a scenario to what is said of it: medians, regrets, and which targets are met.

Regret is the time of a way over that of the best static one in the same repeat, less one. The best
static one is picked in hindsight, from the same runs: the one with the least median time relative
to plain decoding, which is one of them. Luck flatters it, so that a policy that always ran it would
have a regret a little above zero; `never:again` shows how much luck there is.

`table_gain` has no such luck in it: it compares what the rounds of each take by the table of costs
with the static way that takes least by it. What the machine did meanwhile, prompts, and what
deciding takes are not in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from looped_spec.offline.load_policy import NEVER, is_reference

FIXED_TARGET = -0.01
"""Least gain over the best static (K, d) at a fixed batch size."""

RAMP_TARGET = 0.05
"""Least gain over the best single static (K, d) on a ramp."""

OFF_TARGET = 0.01
"""Most that rounds of a policy that stays at K = 0 may cost over plain decoding."""

_MEDIANS = (
    *("duration", "request_throughput", "total_token_throughput"),
    *(
        f"{what}_{name}_ms"
        for name in ("ttft", "tpot", "itl", "e2el")
        for what in ("mean", "median", "std", "p99")
    ),
    *("mean_acceptance_length", "draft_acceptance_rate", "switches", "probe_share", "off_share"),
)

Runs = Mapping[str, Mapping[int, Mapping[str, Any]]]
"""Records by the name of the way and the number of the repeat."""


def summarize(names: Sequence[str], runs: Runs) -> list[dict[str, Any]]:
    """Return a row for each way that has run, in the order of `names`."""
    best = best_static(names, runs)
    never = runs.get(NEVER, {})
    by_table = [
        _table_seconds(list(runs[n].values())) for n in names if n in runs and is_reference(n)
    ]
    least = min((statistics.median(seconds) for seconds in by_table if seconds), default=None)
    rows = []
    for name in names:
        mine = runs.get(name, {})
        if not mine:
            continue
        records = list(mine.values())
        row: dict[str, Any] = {
            "policy": name,
            "is_static": is_reference(name),
            "is_best_static": name == best,
            "repeats": len(records),
            "output_throughput": spread([one["output_throughput"] for one in records]),
            "speedup": spread([1 / ratio for ratio in _ratios(mine, never)]),
            "regret": None,
            "gain_over_best_static": None,
            "table_gain": None,
            "identical_requests": sum(one["identical_requests"] for one in records),
            "requests": sum(one["completed"] for one in records),
            "phase_seconds": _medians([one["phase_seconds"] for one in records]),
        }
        if best is not None:
            ratios = _ratios(mine, runs[best])
            row["regret"] = spread([ratio - 1 for ratio in ratios])
            row["gain_over_best_static"] = spread([1 / ratio - 1 for ratio in ratios])
        seconds = _table_seconds(records)
        if least is not None and seconds:
            row["table_gain"] = spread([least / one - 1 for one in seconds])
        for key in _MEDIANS:
            values = [one[key] for one in records if one[key] is not None]
            row[key] = statistics.median(values) if values else None
        rows.append(row)
    return rows


def best_static(names: Sequence[str], runs: Runs) -> str | None:
    """Return the name of the static way with the least median time relative to plain decoding in
    the same repeat, None before any has run.

    A machine that changes its speed between repeats, or a resumed call, would otherwise prefer
    whoever ran in the fast hours.
    """
    times = {
        name: statistics.median(ratios)
        for name in names
        if is_reference(name) and (ratios := _ratios(runs.get(name, {}), runs.get(NEVER, {})))
    }
    return min(times, key=times.__getitem__, default=None)


def headroom(names: Sequence[str], runs: Runs) -> float | None:
    """Return the gain of the best static (K, d) of each phase, over the best single one.

    It is what a policy could gain that knew the batch size and nothing of the text, had the phases
    been run apart; None before any static way has run. Times are relative to those of plain
    decoding in the same repeat.
    """
    never = runs.get(NEVER, {})
    phases = {
        name: _medians(
            [
                [seconds / never[repeat]["duration"] for seconds in one["phase_seconds"]]
                for repeat, one in runs.get(name, {}).items()
                if repeat in never
            ]
        )
        for name in names
        if is_reference(name)
    }
    single = min((sum(times) for times in phases.values() if times), default=None)
    if single is None:
        return None
    together = sum(min(times) for times in zip(*filter(None, phases.values()), strict=True))
    gain: float = single / together - 1
    return gain


def verdicts(kind: str, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the targets that this scenario tells of, with what was measured (medians of paired
    runs) and whether it is enough."""
    found = []
    for row in rows:
        gain, speedup = row["gain_over_best_static"], row["speedup"]
        if row["policy"] == "goodput" and gain is not None:
            target = FIXED_TARGET if kind == "fixed" else RAMP_TARGET
            found.append(_verdict("gain_over_best_static", row, target, gain["median"]))
        if row["policy"] == "goodput:off" and speedup is not None:
            found.append(_verdict("speedup_over_never", row, -OFF_TARGET, speedup["median"] - 1))
    return found


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Return median, least and greatest; None without values."""
    if not values:
        return None
    return {"median": statistics.median(values), "least": min(values), "greatest": max(values)}


def _verdict(what: str, row: Mapping[str, Any], least: float, got: float) -> dict[str, Any]:
    return {"what": what, "policy": row["policy"], "least": least, "got": got, "met": got >= least}


def _ratios(
    mine: Mapping[int, Mapping[str, Any]], others: Mapping[int, Mapping[str, Any]]
) -> list[float]:
    """Return my time by the other's in each repeat that both have."""
    return [
        one["duration"] / others[repeat]["duration"]
        for repeat, one in mine.items()
        if repeat in others
    ]


def _table_seconds(records: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return what the rounds of some runs take by the table, as far as that is known."""
    return [one["table_seconds"] for one in records if one.get("table_seconds") is not None]


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(column) for column in zip(*rows, strict=True)]
