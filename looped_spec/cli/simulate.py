"""Run a control policy over a recorded or invented load, without a model.

Shown is how far the policy is from the best choice in every phase (regret), what it costs against
never speculating, how soon it settles and how often it changes its mind. docs/control.md has the
format of traces and what the numbers mean.

examples:
  looped-spec simulate examples/traces/ramp.json --policy goodput
  looped-spec simulate examples/traces/ramp.json --policy static:2,1 --seeds 5
  looped-spec simulate examples/traces/hopeless.json --policy ema --json
  looped-spec simulate examples/traces/steps.json --policy goodput --plot steps.png
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from looped_spec.atomic_json import check_target, json_text
from looped_spec.cli import console
from looped_spec.cli.read_json import read_json
from looped_spec.cli.tables import plain_table
from looped_spec.control.config import AdaptiveSpecConfig
from looped_spec.control.scores import result_document
from looped_spec.control.simulate import Run, simulate
from looped_spec.control.trace import Trace
from looped_spec.control.trace_config import POLICIES, policy_maker
from looped_spec.control.trace_document import read_trace
from looped_spec.errors import ConfigError
from looped_spec.presets import Preset
from looped_spec.presets.expectation import starting_acceptance

MAX_SEEDS = 10_000
BAR_FROM_ROUNDS = 20_000
"""Rounds of all seeds below which a progress bar would only flicker."""

MAX_PHASES_SHOWN = 40


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `looped-spec simulate`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = f"{parser.prog} TRACE --policy NAME [flags]"
    parser.add_argument("trace", metavar="TRACE", help="a JSON file with the load")
    parser.add_argument(
        "--policy", required=True, metavar="NAME", help=f"one of {', '.join(POLICIES)}"
    )
    parser.add_argument(
        "--preset",
        metavar="FILE",
        help="for ema and goodput: the file of a preset, or the JSON of an AdaptiveSpecConfig, "
        "which brings buckets, settings and cost; default: the trace's candidates and cost",
    )
    parser.add_argument(
        "--seeds", type=int, default=20, metavar="N", help="runs, seeds 0 to N - 1 (default: 20)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON: every value a mean with its 95 %% interval"
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="also draw what the policy ran in seed 0 beside the best choice, as a PNG; needs the "
        "extra `plots`",
    )


def run(args: argparse.Namespace) -> int:
    """Simulate; everything that can be checked is checked before the first round."""
    if not 1 <= args.seeds <= MAX_SEEDS:
        raise ConfigError(f"seeds must be between 1 and {MAX_SEEDS}, got {args.seeds}")
    trace = read_trace(read_json(args.trace, "the trace"))
    if args.preset is not None and args.policy not in ("ema", "goodput"):
        raise ConfigError(f"--preset is for ema and goodput: policy '{args.policy}' takes none")
    preset = None if args.preset is None else _read_preset(read_json(args.preset, "the preset"))
    make_policy = policy_maker(trace, args.policy, preset)
    if args.plot is not None:
        check_target(Path(args.plot))
        from looped_spec.cli.simulate_plot import check_matplotlib

        check_matplotlib()
    runs = []
    with tqdm(
        total=args.seeds * trace.rounds,
        unit=" rounds",
        unit_scale=True,
        leave=False,
        disable=not console.is_terminal(sys.stderr) or args.seeds * trace.rounds < BAR_FROM_ROUNDS,
    ) as bar:
        for seed in range(args.seeds):
            policy = make_policy(seed)
            keep = args.plot is not None and seed == 0
            runs.append(simulate(trace, policy, seed, clock=time.perf_counter_ns, keep_plans=keep))
            bar.update(trace.rounds)
    if args.plot is not None:
        from looped_spec.cli.simulate_plot import plot_run

        plot_run(trace, runs[0], args.policy, Path(args.plot))
    result = result_document(runs)
    console.write(json_text(result) if args.json else _report(trace, args.policy, runs, result))
    return 0


def _read_preset(document: Any) -> AdaptiveSpecConfig:
    """Return the configuration of a preset, with its cost and acceptance, or a bare one."""
    if not isinstance(document, dict) or "provenance" not in document:
        return AdaptiveSpecConfig.from_json(document)
    preset = Preset.from_json(document)
    prior = preset.config.acceptance_prior or starting_acceptance(preset)
    return dataclasses.replace(preset.config, cost=preset.cost, acceptance_prior=prior)


def _report(trace: Trace, policy: str, runs: list[Run], result: dict[str, Any]) -> str:
    """Lay out the same values as the JSON document, with the phases in a table of their own."""
    rows = [
        ("regret", *_cells(result["regret"], 100, "%")),
        ("slowdown vs never", *_cells(result["slowdown_vs_never"]["mean"], 100, "%")),
        ("... in its worst phase", *_cells(result["slowdown_vs_never"]["worst_phase"], 100, "%")),
        ("flaps per 1000 rounds", *_cells(result["flaps_per_1000"], 1, "")),
        ("probe tax", *_cells(result["probe_tax"], 100, "%")),
        ("switches", *_cells(result["switches"], 1, "")),
        ("time to decide, median", *_cells(result["decide_us"]["p50"], 1, " us")),
        ("time to decide, p99", *_cells(result["decide_us"]["p99"], 1, " us")),
    ]
    shown = list(zip(trace.phases, result["rounds_to_95"], strict=True))
    phases = []
    for number, (phase, settled) in enumerate(shown[:MAX_PHASES_SHOWN]):
        best = phase.best()
        phases.append(
            (
                str(number),
                str(phase.rounds),
                str(phase.batch_size),
                f"{best.num_speculative_tokens},{best.draft_loops}",
                *_cells(settled, 1, ""),
            )
        )
    left_out = len(shown) - len(phases)
    return (
        f"{trace.name}: policy {policy}, {len(runs)} runs of {trace.rounds} rounds\n\n"
        + plain_table(("", "mean", "95 % interval"), rows)
        + "\n\n"
        + plain_table(
            ("phase", "rounds", "B", "best K,d", "rounds to 95 %", "95 % interval"), phases
        )
        + (f"\n... and {left_out} more phases, which --json has" if left_out else "")
        + "\n"
    )


def _cells(estimate: dict[str, float], scale: float, unit: str) -> tuple[str, str]:
    mean, low, high = (scale * estimate[key] for key in ("mean", "low", "high"))
    return f"{mean:.2f}{unit}", f"{low:.2f} to {high:.2f}{unit}"
