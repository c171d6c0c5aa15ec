"""What was seen of a server under load, as tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from looped_spec.cli.tables import number, plain_table


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """Return the median, the 95th and the 99th percentile, and the greatest."""
    if len(values) < 2:
        return dict.fromkeys(("p50", "p95", "p99", "max"))
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": cuts[49], "p95": cuts[94], "p99": cuts[98], "max": max(values)}


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Lay out what was seen of a load, a column for each server."""
    rows = [
        [name, *(number(result[key], decimals) for result in results.values())]
        for name, key, decimals in (
            ("answers finished", "num_finished", 0),
            ("answers aborted by clients", "num_aborted", 0),
            ("requests failed", "num_failed", 0),
            ("answers unlike offline", "num_differing", 0),
            ("tokens per second", "tokens_per_second", 1),
        )
    ]
    for name, key in (
        ("first token", "first_token_seconds"),
        ("between tokens", "between_tokens_seconds"),
        ("whole answer", "whole_seconds"),
    ):
        for share in ("p50", "p95", "p99", "max"):
            cells = [number(result[key][share], 4) for result in results.values()]
            rows.append([f"{name}, {share}, s", *cells])
    cells = [number(result["queue_seconds"], 4) for result in results.values()]
    rows.append(["until its first step, mean, s", *cells])
    return plain_table(["", *results], rows)


def table_of_servers(servers: Mapping[str, Mapping[str, Any]]) -> str:
    """Lay out what the servers left behind, a column for each."""
    rows = [
        [name, *(number(result[key], decimals) for result in servers.values())]
        for name, key, decimals in (
            ("seconds until ready", "ready_seconds", 1),
            ("blocks held at the end", "held_blocks", 0),
            ("draft acceptance", "draft_acceptance_rate", 2),
            ("exit status", "exit_code", 0),
        )
    ]
    for name, place in (("MiB after the first turn", 0), ("MiB at the end", -1)):
        cells = [(one["resident_mib"] or [None])[place] for one in servers.values()]
        rows.append([name, *(number(cell, 1) for cell in cells)])
    return plain_table(["", *servers], rows)


def report(document: Mapping[str, Any]) -> str:
    """Write down a document of `serve_load.py`."""
    lines = []
    for name, result in document["loads"].items():
        lines += [name, table(result["servers"])]
        if ratio := result["first_token_ratio"]:
            turns = ", ".join(f"{one:.2f}" for one in ratio["p50_of_turns"])
            lines.append(
                f"first token, speculation by plain: p50 {number(ratio['p50'], 2)}, "
                f"p95 {number(ratio['p95'], 2)}; p50 of the turns: {turns}"
            )
        lines.append("")
    lines.append(table_of_servers(document["servers"]))
    if restarts := document["restart_seconds"]:
        shown = ", ".join(f"{seconds:.2f}" for seconds in restarts)
        lines.append(f"\nseconds from kill -9 until ready again: {shown}")
    if document["was_interrupted"]:
        lines.append("\ninterrupted: this is what was measured until then")
    return "\n".join(lines)


def is_good(document: Mapping[str, Any]) -> bool:
    """Tell whether every answer came and was right, and nothing was left behind."""
    seen = [one for load in document["loads"].values() for one in load["servers"].values()]
    return (
        bool(seen or document.get("restart_seconds"))
        and all(
            one["num_finished"] and not (one["num_failed"] or one["num_differing"]) for one in seen
        )
        and not any(one["held_blocks"] or one["exit_code"] for one in document["servers"].values())
    )
