"""The targets of docs/control.md, each with what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from control_bench.measure import Runs, bootstrap, per_seed, ratio
from control_bench.statics import best_static, static_times
from control_bench.suites import suite
from control_bench.transitions import of_all, rounds_to_95, summary
from looped_spec.control.scores import (
    Estimate,
    flaps_per_1000,
    probe_tax,
    regret,
    slowdown,
)
from looped_spec.control.simulate import PhaseRun

Suites = Mapping[str, Runs]
"""Suite -> trace -> seed -> phases."""

SCORED = ("a", "b", "c", "d", "e", "g")
"""Suites of the mean regret: all but (f)."""

WITH_BASELINES = ("a", "b", "d", "e", "g")
"""Those that all baselines ran too: scenarios ask for behaviour, not for a rank."""

PHASE_ROUNDS = 400


@dataclass(frozen=True)
class Target:
    """One row: `value` must be at most `target`, or at least if `is_floor`; better `stretch`.

    Attributes:
        metric: what is measured.
        unit: "%", "rounds", "us", "x" or nothing.
        target: what must be reached.
        stretch: where we want to be.
        value: what was measured, with an interval where seeds give one; None if it was not.
        is_floor: more is better.
        note: what to know beside it.
    """

    metric: str
    unit: str
    target: float
    stretch: float
    value: Estimate | None
    is_floor: bool = False
    note: str = ""

    def meets(self, bound: float) -> bool | None:
        """Tell whether the mean reaches a bound; None if nothing was measured."""
        if self.value is None:
            return None
        return self.value.mean >= bound if self.is_floor else self.value.mean <= bound

    def document(self) -> dict[str, Any]:
        """Return the row with its verdicts."""
        return asdict(self) | {
            "target_met": self.meets(self.target),
            "stretch_met": self.meets(self.stretch),
        }


def suite_regret(runs: Runs) -> list[float]:
    """Return for every seed the mean regret over a suite's traces."""
    return per_seed(runs, regret)


def mean_over(found: Suites, suites: Sequence[str]) -> list[float]:
    """Return for every seed the mean over suites of the suite's regret."""
    columns = zip(*(suite_regret(found[name]) for name in suites), strict=True)
    return [math.fsum(column) / len(column) for column in columns]


def regret_targets(goodput: Suites, shadows: Suites) -> list[Target]:
    """Return the rows about regret alone."""
    mixed = {name: shadows.get(name, goodput[name]) for name in SCORED}
    every = [name for name in (*SCORED, "f") if name in goodput]
    worst = max(every, key=lambda name: sum(suite_regret(goodput[name])))
    worst_shadow = max(
        (name for name in (*SCORED, "f")),
        key=lambda name: sum(suite_regret(shadows.get(name, goodput[name]))),
    )
    worst_runs = shadows.get(worst_shadow, goodput[worst_shadow])
    note = "with (f), which changes every 50 rounds"
    return [
        _percent("mean regret, all suites but (f)", 3.0, 2.0, mean_over(goodput, SCORED)),
        _percent("the same with shadow depths", 2.0, 1.5, mean_over(mixed, SCORED)),
        _percent(f"worst suite regret: ({worst})", 6.0, 4.0, suite_regret(goodput[worst]), note),
        _percent(
            f"the same with shadow depths: ({worst_shadow})",
            6.0,
            4.0,
            suite_regret(worst_runs),
            note,
        ),
        _percent(
            "worst suite regret but (f)",
            6.0,
            4.0,
            max((suite_regret(goodput[name]) for name in SCORED), key=sum),
        ),
    ]


def rival_targets(
    goodput: Suites, untuned: Suites, tuned: Mapping[str, Sequence[float]], scale: float
) -> list[Target]:
    """Return the rows that compare with the RFC's EMA and with the best single candidate.

    `tuned` has the regret per seed of the EMA tuned on each landscape.
    """
    ours = {name: suite_regret(goodput[name]) for name in tuned}
    sums = [math.fsum(column) for column in zip(*ours.values(), strict=True)]
    theirs = [math.fsum(column) for column in zip(*tuned.values(), strict=True)]
    return [
        Target(
            "regret over that of the RFC's EMA, untuned",
            "x",
            1 / 3,
            1 / 5,
            ratio(mean_over(goodput, WITH_BASELINES), mean_over(untuned, WITH_BASELINES)),
        ),
        Target(
            "regret over that of the EMA tuned in hindsight on the same load",
            "x",
            2 / 3,
            1 / 2,
            ratio(sums, theirs),
            note=f"landscapes {' and '.join(tuned)}",
        ),
        Target(
            "faster than the best single candidate on (a) and (b)",
            "%",
            5.0,
            8.0,
            _gain_over_static(goodput, scale),
            is_floor=True,
        ),
    ]


def _gain_over_static(goodput: Suites, scale: float) -> Estimate:
    """Return by how many percent more tokens per second all of (a) and (b) gets."""
    traces = [trace for name in ("a", "b") for trace in suite(name, scale)]
    candidate, _ = best_static(traces)
    times = [static_times(trace, candidate) for trace in traces]
    static = sum(time for time, _ in times) / sum(best for _, best in times)
    runs = [phases for name in ("a", "b") for phases in goodput[name].values()]
    gains = []
    for of_seed in zip(*runs, strict=True):
        ours = 1 + regret([phase for phases in of_seed for phase in phases])
        gains.append(100 * (static / ours - 1))
    return Estimate.of(gains)


def safety_targets(goodput: Suites, scale: float) -> list[Target]:
    """Return the rows about what drafting may cost where it does not pay."""
    hopeless = [
        max(column)
        for column in zip(
            *([slowdown(phases) for phases in seeds] for seeds in goodput["h"].values()),
            strict=True,
        )
    ]
    means, where = _worst_phase(goodput, ("a", "b", "A", "B"), round(PHASE_ROUNDS * scale))
    return [
        _percent(
            "slower than never, hopeless for 2000 rounds",
            1.0,
            0.5,
            per_seed(goodput["h"], slowdown),
            f"worst of six loads, mean over seeds: {100 * sum(hopeless) / len(hopeless):.2f} %",
        ),
        _percent("slower than never, worst 400-round phase", 2.5, 1.5, means, where),
    ]


def _worst_phase(found: Suites, suites: Sequence[str], rounds: int) -> tuple[list[float], str]:
    """Return the slowdown per seed of the phase whose mean slowdown is highest, and which it is."""
    candidates: list[tuple[float, list[float], str]] = []
    for name in suites:
        for title, seeds in found[name].items():
            for number, same in enumerate(zip(*seeds, strict=True)):
                if same[0].rounds == rounds:
                    values = [slowdown([one]) for one in same]
                    candidates.append((sum(values), values, f"{title}, phase {number}"))
    _, values, where = max(candidates, key=lambda entry: entry[0])
    return values, where


def speed_targets(found: Suites, suites: Sequence[str], scale: float, title: str) -> list[Target]:
    """Return the rows about rounds to 95 %: medians, and the 95th percentile of off to on."""
    rounds = rounds_to_95(found, suites, scale)
    rows = []
    for kind, is_one, target, stretch, share in (
        ("batch change", None, 0, 0, 0.5),
        ("acceptance change", True, 32, 16, 0.5),
        ("acceptance change", False, 8, 4, 0.5),
        ("off to on", True, 64, 32, 0.5),
        ("off to on", False, 32, 16, 0.5),
        ("off to on", True, 128, 128, 0.95),
        ("off to on", False, 128, 128, 0.95),
    ):
        batch = {None: "any B", True: "B = 1", False: "B >= 8"}[is_one]
        parts = [rounds[key] for key in rounds if key[0] == kind and is_one in (None, key[1])]
        seen = [[n for part in of_seed for n in part] for of_seed in zip(*parts, strict=True)]
        facts = summary(seen)
        name = "median" if share == 0.5 else "95th percentile"
        rows.append(
            Target(
                f"rounds to 95 %, {kind}, {batch}, {name}{title}",
                "rounds",
                target,
                stretch,
                bootstrap(seen, of_all(share)),
                note=f"mean {facts['mean']:.1f} of {facts['count']} phases",
            )
        )
    return rows


def fight(found: Mapping[str, Suites], scale: float) -> list[dict[str, Any]]:
    """Return, for each variant, what looking more often costs where there is nothing to find, and
    how soon it finds what there is."""
    rows = []
    for name, suites in found.items():
        rounds = rounds_to_95(suites, ("b",), scale)
        rows.append(
            {
                "name": name,
                "hopeless": asdict(_as_percent(per_seed(suites["h"], slowdown))),
                **{
                    f"off to on, {'B = 1' if is_one else 'B >= 8'}": summary(
                        rounds["off to on", is_one]
                    )
                    for is_one in (True, False)
                },
            }
        )
    return rows


def calm_targets(goodput: Suites) -> list[Target]:
    """Return the rows about flaps and probes."""
    taxed = [name for name in (*SCORED, "h") if name in goodput]
    columns = zip(*(per_seed(goodput[name], probe_tax) for name in taxed), strict=True)
    tax = [math.fsum(column) / len(column) for column in columns]
    return [
        Target(
            "flaps per 1000 rounds, stationary for 5000",
            "",
            4.0,
            1.0,
            Estimate.of(per_seed(goodput["d"], flaps_per_1000)),
        ),
        _percent("probe tax", 0.5, 0.25, tax, "mean over suites but (f)"),
    ]


def error_target(wrong: Suites) -> Target:
    """Return the row about a cost table that is wrong by 15 % in every cell."""
    return _percent(
        "regret with 15 % random cost error", 4.0, 2.5, mean_over(wrong, tuple(wrong)),
        f"suites {', '.join(wrong)}",
    )  # fmt: skip


def timing_targets(timing: Mapping[str, Mapping[str, float]]) -> list[Target]:
    """Return the rows about the time that deciding takes."""
    worst = {
        key: max(row[key] for row in timing.values()) for key in ("decide_us_p50", "decide_us_p99")
    }
    at_8, at_32 = timing["8"]["feedback_us_p50"], timing["32"]["feedback_us_p50"]
    note = "depends on the machine, see there"
    fastest = timing["1"]["decide_us_p50"] + timing["1"]["feedback_us_p50"]
    return [
        Target(
            "decide and feedback, of a round of 5 ms at B = 1, median",
            "%",
            0.1,
            0.1,
            _point(100 * fastest / 5000),
            note="scenario 39; depends on the machine, see there",
        ),
        Target("decide, median, any B", "us", 10, 3, _point(worst["decide_us_p50"]), note=note),
        Target("decide, p99, any B", "us", 40, 15, _point(worst["decide_us_p99"]), note=note),
        Target("feedback, median, B = 8", "us", 15, 5, _point(at_8), note=note),
        Target("feedback, median, B = 32", "us", 40, 15, _point(at_32), note=note),
        Target(
            "off round over a build without speculation",
            "%",
            1.0,
            0.3,
            None,
            note="a matter of the engine, not of simulation",
        ),
    ]


def score_suites(
    found: Suites, scores: Mapping[str, Callable[[Sequence[PhaseRun]], float]]
) -> dict[str, dict[str, Any]]:
    """Return suite -> score -> estimate over seeds of the mean over traces."""
    return {
        name: {title: asdict(Estimate.of(per_seed(runs, score))) for title, score in scores.items()}
        for name, runs in found.items()
    }


def _percent(
    metric: str, target: float, stretch: float, values: Sequence[float], note: str = ""
) -> Target:
    return Target(metric, "%", target, stretch, _as_percent(values), note=note)


def _as_percent(values: Sequence[float]) -> Estimate:
    return Estimate.of([100 * value for value in values])


def _point(value: float) -> Estimate:
    return Estimate(value, value, value)
