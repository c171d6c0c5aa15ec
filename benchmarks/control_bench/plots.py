"""Pictures of the measurements."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from control_bench.measure import POLICIES, SHADOWS
from control_bench.suites import suite
from control_bench.targets import WITH_BASELINES
from looped_spec.cli.simulate_plot import draw_run
from looped_spec.control.simulate import simulate

DPI = 80


def draw_all(document: Mapping[str, Any], folder: Path) -> None:
    """Write the pictures of a report into a folder."""
    _save(_regret_bars(document), folder / "control-regret.png")
    for name in ("A", "B"):
        _save(_over_time(name), folder / f"control-landscape-{name.lower()}.png")


def _regret_bars(document: Mapping[str, Any]) -> Figure:
    """Draw the regret of every policy: a bar for the mean of the suites, a dot for each suite."""
    rows = {}
    for policy, suites in document["policies"].items():
        if policy != "oracle" and all(name in suites for name in WITH_BASELINES):
            rows[policy] = [100 * suites[name]["regret"]["mean"] for name in WITH_BASELINES]
    for title, by_suite in document["statics"]["arms"].items():
        if title.startswith("best") or title == "never":
            rows[title] = [100 * by_suite[name] for name in WITH_BASELINES if name in by_suite]
    order = sorted(rows, key=lambda title: -sum(rows[title]) / len(rows[title]))
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    means = [sum(rows[title]) / len(rows[title]) for title in order]
    colours = ["C0" if title.startswith("goodput") else "0.75" for title in order]
    axes.barh(order, means, color=colours)
    limit = 1.1 * max(value for values in rows.values() for value in values)
    for height, (title, mean) in enumerate(zip(order, means, strict=True)):
        axes.plot(rows[title], [height] * len(rows[title]), ".", color="C1", markersize=5)
        axes.text(limit, height, f"{mean:.1f} ", ha="right", va="center", fontsize=9)
    axes.set_xlabel(f"regret, %: mean of suites {', '.join(WITH_BASELINES)}; dots are the suites")
    axes.set_xlim(0, limit)
    return figure


def _over_time(name: str) -> Figure:
    (trace,) = suite(name)
    run = simulate(trace, POLICIES[SHADOWS](trace, 0), 0, keep_plans=True)
    figure = Figure(figsize=(11, 6), layout="constrained")
    draw_run(figure, trace, run, SHADOWS)
    return figure


def _save(figure: Figure, path: Path) -> None:
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=DPI, format="png", metadata={"Software": None})
