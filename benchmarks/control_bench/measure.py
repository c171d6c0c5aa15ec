"""Runs policies over traces with paired seeds, and sums up what they did."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

from control_bench.bandits import Ucb
from control_bench.baselines import (
    RFC_LADDERS,
    CostAware,
    LlamaBucket,
    RfcEma,
    SglangEma,
    ThroughputAware,
    TransformersHeuristic,
    TwoArms,
)
from control_bench.setting import Setting
from control_bench.suites import suite, without_shadows
from looped_spec.control.controller import AdaptiveController
from looped_spec.control.goodput_settings import GoodputSettings
from looped_spec.control.scores import RESAMPLES, Estimate
from looped_spec.control.simulate import FixedPlans, PhaseRun, Policy, simulate
from looped_spec.control.trace import Trace
from looped_spec.control.trace_config import policy_maker, trace_config

T = TypeVar("T")

Runs = Mapping[str, Sequence[Sequence[PhaseRun]]]
"""Name of a trace -> for every seed, its phases."""

MakePolicy = Callable[[Trace, int], Policy]

SHADOWS = "goodput, shadow depths"
"""The one policy for which traces offer shadow readouts."""

POLICIES: Mapping[str, MakePolicy] = {
    "oracle": lambda trace, seed: FixedPlans.oracle(trace),
    "goodput": lambda trace, seed: policy_maker(trace, "goodput")(seed),
    SHADOWS: lambda trace, seed: policy_maker(trace, "goodput")(seed),
    "ema, thresholds from cost": lambda trace, seed: policy_maker(trace, "ema")(seed),
    "RFC EMA": lambda trace, seed: RfcEma(Setting(trace, seed), ladders=RFC_LADDERS),
    "RFC EMA, off": lambda trace, seed: RfcEma(Setting(trace, seed), ladders=RFC_LADDERS, off=True),
    "SGLang EMA, d = 1": lambda trace, seed: SglangEma(Setting(trace, seed), 1),
    "SGLang EMA, d = 2": lambda trace, seed: SglangEma(Setting(trace, seed), 2),
    "throughput-aware, d = 1": lambda trace, seed: ThroughputAware(Setting(trace, seed), 1),
    "throughput-aware, d = 2": lambda trace, seed: ThroughputAware(Setting(trace, seed), 2),
    "cost-aware, d = 1": lambda trace, seed: CostAware(Setting(trace, seed), 1),
    "transformers": lambda trace, seed: TransformersHeuristic(Setting(trace, seed)),
    "llama.cpp bucket": lambda trace, seed: LlamaBucket(Setting(trace, seed)),
    "mlxcel two arms": lambda trace, seed: TwoArms(Setting(trace, seed)),
    "UCB": lambda trace, seed: Ucb(Setting(trace, seed)),
    "discounted UCB": lambda trace, seed: Ucb(Setting(trace, seed), discount=0.99),
}


def budget_name(budget: float) -> str:
    """Return the name of the variant with this loss budget."""
    return f"goodput, loss budget {100 * budget:g} %"


LOSS_BUDGETS = (0.00125, 0.0025, 0.005, 0.01, 0.02)
"""Shares of time that probes may lose while drafting is off."""


def _with_budget(budget: float) -> MakePolicy:
    settings = GoodputSettings(loss_budget=budget)
    return lambda trace, seed: AdaptiveController(
        trace_config(trace, "goodput", seed, goodput=settings)
    )


VARIANTS: Mapping[str, MakePolicy] = {
    budget_name(budget): _with_budget(budget) for budget in LOSS_BUDGETS
}
"""The same policy with another setting, to show what the setting is good for."""


def run_trace(make: MakePolicy, trace: Trace, seeds: Iterable[int]) -> list[list[PhaseRun]]:
    """Run a policy over a trace once per seed."""
    return [simulate(trace, make(trace, seed), seed).phases for seed in seeds]


def run_suites(
    names: Sequence[str],
    policy: str,
    seeds: Sequence[int],
    *,
    scale: float = 1.0,
    change: Callable[[Trace], Trace] | None = None,
    jobs: int = 1,
    progress: Callable[[int], object] = lambda rounds: None,
) -> dict[str, Runs]:
    """Run a policy of `POLICIES` or `VARIANTS` over suites: suite -> trace -> seed -> phases.

    `change` is made to every trace first; `progress` hears how many rounds are done more.
    """
    work = [
        (name, number, trace.name)
        for name in names
        for number, trace in enumerate(suite(name, scale))
    ]
    task = partial(_run_one, policy=policy, seeds=list(seeds), scale=scale, change=change)
    found: dict[str, dict[str, list[list[PhaseRun]]]] = {name: {} for name in names}
    with ProcessPoolExecutor(jobs) if jobs > 1 else nullcontext() as pool:
        results = map(task, work) if pool is None else pool.map(task, work)
        for (name, _, title), runs in zip(work, results, strict=True):
            found[name][title] = runs
            progress(len(seeds) * sum(phase.rounds for phase in runs[0]))
    return dict(found)


def _run_one(
    work: tuple[str, int, str],
    policy: str,
    seeds: Sequence[int],
    scale: float,
    change: Callable[[Trace], Trace] | None,
) -> list[list[PhaseRun]]:
    name, number, _ = work
    trace = suite(name, scale)[number]
    if policy != SHADOWS:
        trace = without_shadows(trace)
    if change is not None:
        trace = change(trace)
    return run_trace({**POLICIES, **VARIANTS}[policy], trace, seeds)


def per_seed(runs: Runs, score: Callable[[Sequence[PhaseRun]], float]) -> list[float]:
    """Return for every seed the mean of a score over traces."""
    columns = zip(*([score(phases) for phases in seeds] for seeds in runs.values()), strict=True)
    return [math.fsum(column) / len(column) for column in columns]


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Estimate:
    """Return the ratio of two means over the same seeds, resampled together."""

    def of(sample: Sequence[tuple[float, float]]) -> float:
        below = sum(b for _, b in sample)
        return sum(a for a, _ in sample) / below if below else math.nan

    return bootstrap(list(zip(numerator, denominator, strict=True)), of)


def bootstrap(seeds: Sequence[T], statistic: Callable[[Sequence[T]], float]) -> Estimate:
    """Return a statistic of what the seeds gave, with the interval from resampling the seeds."""
    choices = random.Random(0)
    found = sorted(statistic(choices.choices(seeds, k=len(seeds))) for _ in range(RESAMPLES))
    ends = found[round(0.025 * RESAMPLES)], found[round(0.975 * RESAMPLES) - 1]
    return Estimate(statistic(seeds), *ends)
