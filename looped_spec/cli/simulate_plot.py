"""A picture of a simulated run: what the policy ran, over time, beside the best choice."""

from __future__ import annotations

from itertools import chain, repeat
from pathlib import Path
from typing import Any

from looped_spec.control.simulate import Run
from looped_spec.control.trace import Trace
from looped_spec.errors import LoopedSpecError, UnsupportedError


def check_matplotlib() -> None:
    """Raise `UnsupportedError` with the command that helps if plots cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            "a plot needs matplotlib: pip install 'looped-spec[plots]'"
        ) from error


def plot_run(trace: Trace, run: Run, policy: str, path: Path) -> None:
    """Draw K, d and first-position acceptance over rounds; `run` must have kept its plans."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    draw_run(figure, trace, run, policy)
    try:
        figure.savefig(path, dpi=80, format="png")
    except OSError as error:
        raise LoopedSpecError(f"cannot write '{path}': {error.strerror}") from error


def draw_run(figure: Any, trace: Trace, run: Run, policy: str) -> None:
    """Draw into a matplotlib figure."""
    tokens, loops, load = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 2))
    best = list(chain.from_iterable(repeat(phase.best(), phase.rounds) for phase in trace.phases))
    rounds = range(len(best))
    held = [plan.candidate for plan in run.plans]
    for axes, name, label in (
        (tokens, "num_speculative_tokens", "K, draft tokens"),
        (loops, "draft_loops", "d, draft loops"),
    ):
        oracle = [getattr(candidate, name) for candidate in best]
        axes.fill_between(rounds, oracle, step="post", color="0.85", label="best choice")
        chosen = [getattr(candidate, name) for candidate in held]
        axes.step(rounds, chosen, where="post", color="C0", linewidth=1, label=policy)
        probes = [number for number, plan in enumerate(run.plans) if plan.probe]
        axes.plot(probes, [chosen[n] for n in probes], "|", color="C1", label="probe")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=-0.2)
    tokens.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, fontsize=8)
    tokens.set_title(f"{trace.name}, seed 0", loc="left")
    for depth in sorted(trace.phases[0].requests[0]):
        rates = [
            sum(kind[depth][0] for kind in phase.requests) / len(phase.requests)
            for phase in trace.phases
        ]
        load.step(
            rounds,
            list(
                chain.from_iterable(
                    repeat(rate, phase.rounds)
                    for rate, phase in zip(rates, trace.phases, strict=True)
                )
            ),
            where="post",
            label=f"d = {depth}",
        )
    load.set_ylabel("acceptance of\nthe first draft")
    load.set_ylim(0, 1)
    load.set_xlabel("round")
    start = 0
    for phase in trace.phases if len(trace.phases) <= 24 else ():
        load.text(start + phase.rounds / 2, 0.04, f"B={phase.batch_size}", ha="center", fontsize=8)
        start += phase.rounds
    load.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
