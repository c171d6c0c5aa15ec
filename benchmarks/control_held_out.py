"""Measures control policies on loads that were never looked at while they were made.

Loads are drawn from seeds beyond those that anything was tuned on; see `control_bench.held_out`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from control_bench.held_out import FIRST_SEED, held_out
from control_bench.measure import POLICIES, SHADOWS, run_trace
from control_bench.statics import best_static
from control_bench.suites import with_cost_error, without_shadows

from looped_spec.atomic_json import check_target, json_text, write_json
from looped_spec.control.scores import Estimate, probe_tax, regret, slowdown, worst_slowdown
from looped_spec.control.simulate import PhaseRun
from looped_spec.control.trace import CostError
from looped_spec.errors import ConfigError, LoopedSpecError
from looped_spec.version import __version__

COMPARED = ("goodput", SHADOWS, "ema, thresholds from cost", "RFC EMA", "RFC EMA, off", "oracle")
WRONG_TABLE = "goodput, every cell of its table times exp(N(0, 0.15))"
CELLS = CostError(0.15)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, or 2 for a mistake on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loads", type=int, default=60, help="traces (default: 60)")
    parser.add_argument("--quick", action="store_true", help="a run of seconds, of no worth")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write control-held-out.json and .md here"
    )
    args = parser.parse_args(argv)
    try:
        if args.loads < 1:
            raise ConfigError(f"--loads must be at least 1, got {args.loads}")
        if args.out is not None:
            check_target(args.out / "control-held-out.json")
        measured = measure(min(args.loads, 2) if args.quick else args.loads, args.quick)
    except LoopedSpecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    words = sys.argv[1:] if argv is None else argv
    measured["command"] = shlex.join(["benchmarks/control_held_out.py", *words])
    document = json.loads(json_text(measured))  # What is reported is what can be read again.
    if args.out is None:
        print(page(document))
        return 0
    write_json(args.out / "control-held-out.json", document)
    (args.out / "control-held-out.md").write_text(page(document), encoding="utf-8")
    return 0


def measure(loads: int, is_quick: bool = False) -> dict[str, Any]:
    """Run all policies once over each load; intervals are over loads."""
    traces = held_out(loads, 0.1 if is_quick else 1.0)
    rows = []
    for title in (*COMPARED, WRONG_TABLE):
        runs: list[list[PhaseRun]] = []
        for number, trace in enumerate(traces):
            wrong = with_cost_error(trace, CELLS) if title == WRONG_TABLE else trace
            offered = wrong if title == SHADOWS else without_shadows(wrong)
            policy = POLICIES["goodput" if title == WRONG_TABLE else title]
            runs += run_trace(policy, offered, [FIRST_SEED + number])
        rows.append({"policy": title, **_scores(runs)})
    static = [100 * best_static([trace])[1] for trace in traces]
    never = [100 * regret_of_never(trace_runs) for trace_runs in _never(traces)]
    return {
        "schema_version": 1,
        "looped_spec": __version__,
        "loads": loads,
        "quick": is_quick,
        "policies": rows,
        "best_static_of_each_load": asdict(Estimate.of(static)),
        "never": asdict(Estimate.of(never)),
    }


def _never(traces: Sequence[Any]) -> list[list[PhaseRun]]:
    return [run_trace(POLICIES["oracle"], trace, [FIRST_SEED])[0] for trace in traces]


def regret_of_never(oracle: Sequence[PhaseRun]) -> float:
    """Return the regret of plain decoding, from the times that a run of the oracle has beside."""
    return sum(p.plain_ms for p in oracle) / sum(p.best_ms for p in oracle) - 1.0


def _scores(runs: Sequence[Sequence[PhaseRun]]) -> dict[str, Any]:
    def estimate(score: Callable[[Sequence[PhaseRun]], float]) -> dict[str, float]:
        return asdict(Estimate.of([100 * score(phases) for phases in runs]))

    losses = sorted(100 * slowdown([phase]) for phases in runs for phase in phases)
    return {
        "regret": estimate(regret),
        "slowdown_vs_never": estimate(slowdown),
        "worst_phase": estimate(worst_slowdown),
        "probe_tax": estimate(probe_tax),
        "phases": len(losses),
        "phases_over_2.5": sum(loss > 2.5 for loss in losses) / len(losses),
        "worst_load": max(100 * regret(phases) for phases in runs),
    }


def page(document: dict[str, Any]) -> str:
    """Return the measurements as a page."""
    lines = [
        "# Control policies on held-out loads",
        "",
        f"Made by `{document['command']}`: {document['loads']} loads, drawn from seeds that "
        "nothing was tuned or looked at on, one run each. Means over loads, in brackets their 95 % "
        "bootstrap interval. Best single candidate of each load, in hindsight: regret "
        f"{_both(document['best_static_of_each_load'])} %; never speculating: "
        f"{_both(document['never'])} %.",
        "",
        "| policy | regret, % | worst load | against never, % | its worst phase in a load, % "
        "| phases more than 2.5 % slower than never | probe tax, % |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row['policy']} | {_both(row['regret'])} | {row['worst_load']:.1f} "
        f"| {_both(row['slowdown_vs_never'])} | {_both(row['worst_phase'])} "
        f"| {100 * row['phases_over_2.5']:.1f} % | {_both(row['probe_tax'])} |"
        for row in document["policies"]
    ]
    return "\n".join(lines) + "\n"


def _both(value: dict[str, float]) -> str:
    return f"{value['mean']:.2f} ({value['low']:.2f} to {value['high']:.2f})"


if __name__ == "__main__":
    sys.exit(main())
