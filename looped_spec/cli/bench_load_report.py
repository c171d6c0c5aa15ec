"""What `bench load` shows: a table for each load, and whether the targets are met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from looped_spec.cli.tables import number, percent, plain_table
from looped_spec.offline.load_policy import NEVER

_HEADS = (
    *("policy", "tokens/s", "over never", "against best static (range)", "by table"),
    *("acceptance", "tokens/round", "off", "switches", "ttft ms", "tpot ms", "identical requests"),
)


def report(scenarios: Sequence[Mapping[str, Any]], *, all_rows: bool = False) -> str:
    """Lay out all scenarios; of the static ways only the best one and plain decoding are shown,
    unless `all_rows`."""
    parts = []
    for scenario in scenarios:
        lines = [title(scenario), plain_table(_HEADS, rows(scenario, all_rows=all_rows))]
        lines += [verdict_line(verdict) for verdict in scenario["verdicts"]]
        if scenario["kind"] == "ramp" and scenario["headroom"] is not None:
            lines.append(
                "the best static K and d of each phase together: "
                f"{_signed(scenario['headroom'])} against the best single one"
            )
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n" if parts else "nothing was measured\n"


def title(scenario: Mapping[str, Any]) -> str:
    """Return what a scenario is, in a line."""
    repeats = max((row["repeats"] for row in scenario["results"]), default=0)
    drains = ", phases drain" if scenario["drains"] else ""
    count = sum(requests for _, requests in scenario["phases"])
    return (
        f"{scenario['profile']}, {scenario['mixture']} texts of the {scenario['group']} group "
        f"({count} requests a run, {scenario['distinct_prompts']} different prompts; "
        f"medians of {repeats} runs{drains})"
    )


def rows(scenario: Mapping[str, Any], *, all_rows: bool) -> list[tuple[str, ...]]:
    """Return the cells of the table of a scenario."""
    found: list[tuple[str, ...]] = []
    for row in scenario["results"]:
        name = row["policy"]
        if row["is_static"] and not (all_rows or row["is_best_static"] or name == NEVER):
            continue
        gain = row["gain_over_best_static"]
        found.append(
            (
                f"{name} (best static)" if row["is_best_static"] else name,
                number(row["output_throughput"]["median"], 0),
                number(row["speedup"]["median"]) if row["speedup"] else "-",
                f"{_signed(gain['median'])} ({_signed(gain['least'])} to "
                f"{_signed(gain['greatest'])})"
                if gain
                else "-",
                _signed(row["table_gain"]["median"]) if row["table_gain"] else "-",
                percent(row["draft_acceptance_rate"]),
                number(row["mean_acceptance_length"]),
                percent(row["off_share"]),
                number(row["switches"], 0),
                number(row["median_ttft_ms"], 1),
                number(row["median_tpot_ms"], 2),
                f"{row['identical_requests']} of {row['requests']}",
            )
        )
    return found


def verdict_line(verdict: Mapping[str, Any]) -> str:
    """Say a target, what was measured, and whether that is enough."""
    what = {
        "gain_over_best_static": "against the best static K and d",
        "speedup_over_never": "against plain decoding",
    }[verdict["what"]]
    met = "met" if verdict["met"] else "missed"
    return (
        f"{verdict['policy']} {what}: {_signed(verdict['got'])}, target at least "
        f"{_signed(verdict['least'])}: {met}"
    )


def run_line(key: tuple[str, str, str, bool], name: str, record: Mapping[str, Any]) -> str:
    """Say what a single run gave, for the progress bar."""
    return f"{key[1]}, {key[2]}: {name} {record['output_throughput']:.0f} tokens/s"


def _signed(share: float) -> str:
    return f"{100 * share:+.1f}%"
