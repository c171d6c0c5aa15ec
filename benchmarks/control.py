"""Compares the control policies with others, on simulated loads: regret, targets, plots.

Suites (a) to (g), landscapes and targets are described in docs/control.md. The full run takes
about a quarter of an hour on one core; `--quick` cuts phases, seeds and tuning down to seconds and
proves only that everything runs.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from control_bench.measure import POLICIES, SHADOWS, VARIANTS, Runs, run_suites
from control_bench.published import REPLAYS
from control_bench.report import report
from control_bench.scenarios import scenarios
from control_bench.statics import best_static, static_regret
from control_bench.suites import SUITES, suite, with_cost_error, without_shadows
from control_bench.targets import (
    calm_targets,
    error_target,
    fight,
    mean_over,
    regret_targets,
    rival_targets,
    safety_targets,
    score_suites,
    speed_targets,
    timing_targets,
)
from control_bench.timing import controller_costs
from control_bench.transitions import rounds_to_95, summary
from control_bench.tuning import FINALISTS, SCREEN_SEEDS, tune
from tqdm import tqdm

from looped_spec.atomic_json import check_target, json_text, write_json
from looped_spec.cli.read_json import read_json
from looped_spec.control.goodput_settings import GoodputSettings
from looped_spec.control.plan import Candidate
from looped_spec.control.scores import (
    Estimate,
    flaps_per_1000,
    probe_tax,
    regret,
    sampled_regret,
    slowdown,
    worst_slowdown,
)
from looped_spec.control.trace import CostError
from looped_spec.errors import ConfigError, LoopedSpecError
from looped_spec.version import __version__

SCORES = {
    "regret": regret,
    "sampled_regret": sampled_regret,
    "slowdown_vs_never": slowdown,
    "worst_phase": worst_slowdown,
    "flaps_per_1000": flaps_per_1000,
    "probe_tax": probe_tax,
}
MIXED = ("a", "b", "A", "B")
"""Suites on which wrong tables and the noise floor are measured."""

WITH_SHADOWS = ("a", "b", "c", "d", "e", "f", "A", "B", "h")
"""Suites that offer shadow readouts; the published tables do not."""

VARIANT_SEEDS = 8
"""Seeds for what only illustrates."""

CELLS = "every cell times exp(N(0, 0.15))"
ERRORS = {
    CELLS: CostError(0.15),
    "d = 1 20 % too dear": CostError(depths={1: 1.2}),
    "d = 2 20 % too cheap": CostError(depths={2: 0.8}),
    "K = 0 20 % too dear": CostError(depths={0: 1.2}),
}
"""What is wrong with the policy's cost table."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, or 2 for a mistake on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="paired seeds (default: 20)")
    parser.add_argument("--quick", action="store_true", help="a run of seconds, of no worth")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write control.json, control.md and plots here"
    )
    parser.add_argument(
        "--retime",
        action="store_true",
        help="only measure the controller's own time again, in the control.json that is in --out",
    )
    parser.add_argument("--no-plots", action="store_true", help="leave out what needs matplotlib")
    args = parser.parse_args(argv)
    try:
        if args.retime:
            return _retime(args.out)
        measured = _run(args, sys.argv[1:] if argv is None else argv)
    except LoopedSpecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    document = json.loads(json_text(measured))  # What is reported is what can be read again.
    text = report(document)
    if args.out is not None:
        write_json(args.out / "control.json", document)
        (args.out / "control.md").write_text(text, encoding="utf-8")
        if not args.no_plots:
            from control_bench.plots import draw_all

            draw_all(document, args.out)
    else:
        print(text)
    return 0


def _run(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    if args.seeds < 1 or args.jobs < 1:
        raise ConfigError(f"--seeds and --jobs must be at least 1, got {args.seeds}, {args.jobs}")
    if args.out is not None:
        check_target(args.out / "control.json")
    scale, tried = (0.03, 4) if args.quick else (1.0, 150)
    seeds = list(range(min(args.seeds, 2) if args.quick else args.seeds))
    total = _total_rounds(scale, len(seeds), tried)
    with tqdm(total=total, unit=" rounds", unit_scale=True, disable=None) as bar:
        measure = partial(run_suites, seeds=seeds, scale=scale, jobs=args.jobs, progress=bar.update)
        document = _measure(measure, seeds, scale, tried, bar.update)
    _time(document, 100 if args.quick else 4000)
    document["provenance"] = {
        "command": shlex.join(["benchmarks/control.py", *argv]),
        "looped_spec": __version__,
        "machine": _machine(),
        "quick": args.quick,
        "rounds": total,
        "seeds": len(seeds),
    }
    return document


def _time(document: dict[str, Any], rounds: int) -> None:
    """Measure the controller's own time, and put it and its targets into the document."""
    document["timing"] = {p: controller_costs(p, rounds) for p in ("goodput", "ema")}
    rows = [target.document() for target in timing_targets(document["timing"]["goodput"])]
    names = {row["metric"] for row in rows}
    kept = [row for row in document["targets"] if row["metric"] not in names]
    document["targets"] = kept + rows


def _retime(folder: Path | None) -> int:
    """Measure time again, as on a machine that does nothing else, and keep the rest."""
    if folder is None:
        raise ConfigError("--retime needs --out, the folder with the control.json to complete")
    document = read_json(str(folder / "control.json"), "the measurements")
    _time(document, 4000)
    document = json.loads(json_text(document))
    write_json(folder / "control.json", document)
    (folder / "control.md").write_text(report(document), encoding="utf-8")
    return 0


def _measure(
    measure: Callable[..., dict[str, Runs]],
    seeds: Sequence[int],
    scale: float,
    tried: int,
    progress: Callable[[int], object],
) -> dict[str, Any]:
    """Run everything that is simulated and return what it says."""
    found: dict[str, dict[str, Runs]] = {}
    for policy in POLICIES:
        found[policy] = measure(_suites_of(policy), policy)
    goodput, shadows = found["goodput"], found[SHADOWS]
    wrong = {"none": {name: goodput[name] for name in MIXED}}
    for title, error in ERRORS.items():
        wrong[title] = measure(MIXED, "goodput", change=partial(with_cost_error, error=error))
    wrong["none, with shadow depths"] = {name: shadows[name] for name in MIXED}
    wrong[f"{CELLS}, with shadow depths"] = measure(
        MIXED, SHADOWS, change=partial(with_cost_error, error=ERRORS[CELLS])
    )
    again = measure(MIXED, "goodput", seeds=[seed + 1000 for seed in seeds])
    budgets = {name: measure(("b", "h"), name, seeds=seeds[:VARIANT_SEEDS]) for name in VARIANTS}
    tuned = {}
    for name in ("A", "B"):
        (trace,) = suite(name, scale)
        tuned[name] = tune(without_shadows(trace), seeds, tried, progress)
    targets = [
        *regret_targets(goodput, shadows),
        *rival_targets(
            goodput, found["RFC EMA"], {name: t["regret"] for name, t in tuned.items()}, scale
        ),
        *safety_targets(goodput, scale),
        *speed_targets(goodput, MIXED, scale, ""),
        *speed_targets(shadows, MIXED, scale, ", with shadow depths"),
        *calm_targets(goodput),
        error_target(wrong[CELLS]),
    ]
    first, second = mean_over(goodput, MIXED), mean_over(again, MIXED)
    return {
        "schema_version": 1,
        "policies": {policy: score_suites(suites, SCORES) for policy, suites in found.items()},
        "statics": _statics(scale),
        "tuned_ema": {
            name: {**t, "mean": sum(t["regret"]) / len(t["regret"])} for name, t in tuned.items()
        },
        "cost_error": {
            title: {
                name: _percent([100 * x for x in mean_over(suites, (name,))]) for name in suites
            }
            for title, suites in wrong.items()
        },
        "rounds_to_95": {
            policy: {
                f"{kind}, {'B = 1' if is_one else 'B >= 8'}": summary(rounds)
                for (kind, is_one), rounds in sorted(
                    rounds_to_95(found[policy], MIXED, scale).items()
                )
            }
            for policy in ("goodput", SHADOWS, "RFC EMA", "RFC EMA, off")
        },
        "fight": fight(budgets, scale),
        "loss_budget": GoodputSettings().loss_budget,
        "scenarios": _scenarios(goodput, shadows),
        "published": _published(found),
        "noise_floor": {
            "suites": list(MIXED),
            "first": _percent([100 * x for x in first]),
            "second": _percent([100 * x for x in second]),
            "difference": 100 * (math.fsum(second) - math.fsum(first)) / len(seeds),
        },
        "targets": [target.document() for target in targets],
    }


def _suites_of(policy: str) -> list[str]:
    """Scenarios are for our own policies, shadows where they are offered."""
    if policy == SHADOWS:
        return list(WITH_SHADOWS)
    return [name for name in SUITES if name != "c" or policy in ("goodput", "oracle")]


def _total_rounds(scale: float, seeds: int, tried: int) -> int:
    rounds = {name: sum(trace.rounds for trace in suite(name, scale)) for name in SUITES}
    mixed = sum(rounds[name] for name in MIXED)
    policies = sum(rounds[name] for policy in POLICIES for name in _suites_of(policy))
    tuned = tried * min(SCREEN_SEEDS, seeds) + min(FINALISTS, tried) * seeds
    variants = len(VARIANTS) * min(VARIANT_SEEDS, seeds) * (rounds["b"] + rounds["h"])
    tuned *= rounds["A"] + rounds["B"]
    return seeds * (policies + (len(ERRORS) + 2) * mixed) + variants + tuned


def _statics(scale: float) -> dict[str, Any]:
    """Return the regret of single candidates by suite: each of them, the best, and in hindsight."""
    traces = {name: suite(name, scale) for name in SUITES if name != "c"}
    own = [name for name in traces if name != "g"]  # other candidates

    def mean(candidate: Candidate, name: str) -> float:
        return sum(static_regret(t, candidate) for t in traces[name]) / len(traces[name])

    common = traces["a"][0].candidates
    best = min(common, key=lambda c: sum(mean(c, name) for name in own))
    arms: dict[str, dict[str, float]] = {}
    for candidate in common:
        k, d = candidate.num_speculative_tokens, candidate.draft_loops
        title = "never" if k == 0 else f"static {k},{d}"
        if candidate == best:
            title = f"best single candidate, {k},{d}"
        arms[title] = {name: mean(candidate, name) for name in (traces if k == 0 else own)}
    return {
        "arms": arms,
        "best_of_each_trace": {
            name: sum(best_static([t])[1] for t in listed) / len(listed)
            for name, listed in traces.items()
        },
    }


def _scenarios(goodput: dict[str, Runs], shadows: dict[str, Runs]) -> list[dict[str, Any]]:
    rows = []
    for scenario in scenarios():
        passed = {}
        for policy, suites in (("goodput", goodput), (SHADOWS, shadows)):
            runs = suites["c"][scenario.trace.name]
            passed[policy] = sum(scenario.check(phases) for phases in runs) / len(runs)
        rows.append(
            {
                "number": scenario.number,
                "name": scenario.trace.name,
                "required": scenario.required,
                "passed": passed,
            }
        )
    return rows


def _published(found: dict[str, dict[str, Runs]]) -> list[dict[str, Any]]:
    rows = []
    for replay in REPLAYS:
        name = replay.trace.name
        regrets = {
            policy: [regret(phases) for phases in found[policy]["g"][name]]
            for policy in ("goodput", "ema, thresholds from cost", "RFC EMA", "RFC EMA, off")
        }
        rows.append(
            {
                "name": name,
                "source": replay.source,
                "assumed": replay.assumed,
                "held_out": replay.is_held_out,
                "best_static": best_static([replay.trace])[1],
                "regret": {policy: sum(of) / len(of) for policy, of in regrets.items()},
            }
        )
    return rows


def _percent(values: Sequence[float]) -> dict[str, float]:
    return asdict(Estimate.of(values))


def _machine() -> str:
    return f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"


if __name__ == "__main__":
    sys.exit(main())
