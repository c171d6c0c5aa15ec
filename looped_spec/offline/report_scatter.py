"""Scatter plots: speed-up against acceptance, and round times against the ideal model."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from looped_spec.offline.figures import COLOURS, GREY, INK, Picture, new_figure
from looped_spec.offline.report_data import Point, at, depths_of, few, points
from looped_spec.presets import Preset


def scatter_picture(preset: Preset, group: str | None) -> Picture | None:
    """Draw speed-up against acceptance, a panel for each batch size, at the shortest context."""
    found = [point for point in points(preset, group) if point.speedup is not None]
    if not found:
        return None
    sizes, lengths = few(found)
    figure = new_figure(0.8 + 2.9 * len(sizes), 4.4)
    panels = figure.subplots(1, len(sizes), squeeze=False, sharey=True)
    words = []
    depths = depths_of(found)
    for axes, size in zip(panels[0], sizes, strict=True):
        here = at(found, size, lengths[0])
        for number, depth in enumerate(depths):
            mine = [p for p in here if p.candidate.draft_loops == depth]
            rates, speeds = [p.acceptance for p in mine], [p.speedup for p in mine]
            colour = COLOURS[number % len(COLOURS)]
            axes.plot(rates, speeds, color=colour, linewidth=0.8, alpha=0.6)
            axes.scatter(rates, speeds, color=colour, s=22, label=f"d = {depth}", zorder=3)
            for p in mine:
                axes.annotate(
                    p.candidate.num_speculative_tokens,
                    (p.acceptance, p.speedup),
                    textcoords="offset points",
                    xytext=(5, 4),
                    fontsize=8,
                    color=INK,
                )
        chosen = [p for p in here if p.is_candidate]
        _rings(axes, [(p.acceptance, p.speedup) for p in chosen])
        axes.axhline(1, color=GREY, linewidth=1, linestyle="--")
        axes.set_title(f"B = {size}, L = {lengths[0]}", fontsize=10)
        axes.set_xlabel("draft acceptance rate")
        axes.margins(0.12)
        words.append(f"at B={size} {_correlation(here)}")
    panels[0][0].set_ylabel("speed-up over plain decoding")
    _legend(figure, panels[0][-1])
    alt = (
        "Speed-up against draft acceptance rate, a line for each d with K beside its points: "
        + "; ".join(words)
        + "."
    )
    return Picture("speedup-against-acceptance", figure, alt)


def round_time_picture(preset: Preset, group: str | None) -> Picture | None:
    """Draw measured round times against the ideal model, a panel for each batch size."""
    found = points(preset, group)
    if not found:
        return None
    sizes, lengths = few(found)
    figure = new_figure(0.8 + 2.9 * len(sizes), 3.8)
    panels = figure.subplots(1, len(sizes), squeeze=False)
    words = []
    depths = depths_of(found)
    for axes, size in zip(panels[0], sizes, strict=True):
        here = at(found, size, lengths[0])
        ideal = [p.ideal_ms(preset.full_loops) for p in here]
        for number, depth in enumerate(depths):
            mine = [p for p in here if p.candidate.draft_loops == depth]
            axes.scatter(
                [p.ideal_ms(preset.full_loops) for p in mine],
                [p.ms for p in mine],
                color=COLOURS[number % len(COLOURS)],
                s=22,
                label=f"d = {depth}",
                zorder=3,
            )
        chosen = [p for p in here if p.is_candidate]
        _rings(axes, [(p.ideal_ms(preset.full_loops), p.ms) for p in chosen])
        if here:
            plain = here[0].plain_ms
            axes.scatter([plain], [plain], marker="x", color=INK, label="plain", zorder=3)
            high = max(*ideal, *(p.ms for p in here))
            axes.plot([0, high], [0, high], color=GREY, linewidth=1, linestyle="--")
            ratios = [p.ms / one for p, one in zip(here, ideal, strict=True)]
            words.append(
                f"at B={size} rounds take {min(ratios):.2f} to {max(ratios):.2f} times the ideal, "
                f"median {statistics.median(ratios):.2f}"
            )
        axes.set_title(f"B = {size}, L = {lengths[0]}", fontsize=10)
        axes.set_xlabel("ideal c (D + dK), ms")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
    panels[0][0].set_ylabel("time of a round, ms")
    _legend(figure, panels[0][-1])
    alt = (
        "Round times of the cost table against the ideal model, equal on the dashed line: "
        + "; ".join(words)
        + "."
    )
    return Picture("round-time", figure, alt)


def _rings(axes: Any, places: Sequence[tuple[Any, Any]]) -> None:
    """Put rings around what may be chosen."""
    axes.scatter(
        [x for x, _ in places],
        [y for _, y in places],
        s=64,
        facecolors="none",
        edgecolors=INK,
        linewidths=1.1,
        label="may be chosen",
        zorder=4,
    )


def _legend(figure: Any, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower left",
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        columnspacing=1.4,
        handletextpad=0.3,
    )


def _correlation(found: Sequence[Point]) -> str:
    """Say whether higher acceptance goes with higher speed."""
    pairs = [(p.acceptance or 0.0, p.speedup or 0.0) for p in found]
    xs, ys = [x for x, _ in pairs], [y for _, y in pairs]
    if len(pairs) < 3 or len(set(xs)) < 2 or len(set(ys)) < 2:
        return "there are too few points to correlate"
    return f"their correlation is {statistics.correlation(xs, ys):+.2f}"
