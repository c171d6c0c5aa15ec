"""Heat maps over K and d: speed-up and acceptance."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from looped_spec.control.plan import Candidate
from looped_spec.offline.figures import INK, Picture, new_figure
from looped_spec.offline.report_data import (
    Point,
    acceptance_rate,
    at,
    best,
    depths_of,
    drafts_of,
    few,
    named,
    points,
    pooled,
    workloads,
)
from looped_spec.presets import Preset

_LEAST_REACH = 0.05
"""Least reach of the colours, in the logarithm: smaller differences are not worth a colour."""

_ACROSS = 3
"""Panels beside each other."""

_PALER = 1.3
"""Keeps off the darkest ends of the colours, on which a frame could not be seen."""

_THIN, _THICK = 1.3, 2.6
"""Widths of the frames around what may be chosen, and around the start."""

_BAR: dict[str, Any] = {"pad": 0.015, "aspect": 28}

_TICKS = (0.25, 0.5, 0.7, 0.8, 0.9, 1.05, 1.1, 1.2, 1.3, 1.5, 1.75, 2, 2.5, 3, 4)


def speedup_picture(preset: Preset, group: str | None) -> Picture | None:
    """Draw the predicted speed-up over K and d, a panel for each batch size and context length."""
    from matplotlib.colors import TwoSlopeNorm

    found = [point for point in points(preset, group) if point.speedup is not None]
    if not found:
        return None
    sizes, lengths = few(found)
    depths, drafts = depths_of(found), drafts_of(found)
    figure = new_figure(1.3 + _panel(drafts) * len(sizes), 0.8 + _height(depths) * len(lengths))
    panels = figure.subplots(len(lengths), len(sizes), squeeze=False)
    logs = [math.log(point.speedup or 1.0) for point in found]
    low, high = min(-_LEAST_REACH, *logs), max(_LEAST_REACH, *logs)
    norm = TwoSlopeNorm(vmin=_PALER * low, vcenter=0.0, vmax=_PALER * high)
    image, words = None, []
    for row, length in enumerate(lengths):
        for column, size in enumerate(sizes):
            axes, here = panels[row][column], at(found, size, length)
            speed = {_place(point): point.speedup for point in here}
            image = _heat(
                axes,
                drafts,
                depths,
                lambda d, k, speed=speed: speed.get((d, k)),  # type: ignore[misc]
                cmap="RdBu",
                norm=norm,
                scale=math.log,
            )
            for point in here:
                _mark(axes, drafts, depths, point)
            axes.set_title(f"B = {size}, L = {length}", fontsize=10)
            top = best(here)
            words.append(
                f"at B={size}, L={length} "
                + (f"the best is {named(top)} with {top.speedup:.2f}" if top else "none pays")
            )
    bar = figure.colorbar(image, ax=panels.ravel().tolist(), shrink=0.85, **_BAR)
    bar.set_label("speed-up over plain decoding")
    ticks = _ticks(norm)
    bar.set_ticks([math.log(tick) for tick in ticks])
    bar.set_ticklabels([f"{tick:g}" for tick in ticks])
    _label_outer(panels)
    _frame_legend(figure, {"may be chosen at this B": _THIN, "the start": _THICK})
    alt = "Heat maps of the speed-up over plain decoding by K and d: " + "; ".join(words) + "."
    return Picture("speedup", figure, alt)


def acceptance_picture(preset: Preset, group: str | None) -> Picture | None:
    """Draw the draft acceptance rate over K and d, a panel for each kind of text."""
    from matplotlib.colors import Normalize

    kinds = workloads(preset, group)
    if not kinds:
        return None
    entries = {kind: pooled(preset.acceptance, group, kind) for kind in kinds}
    depths = sorted({entry.draft_loops for found in entries.values() for entry in found})
    drafts = drafts_of(points(preset, group)) or list(
        range(1, 1 + max(len(e.chances) for found in entries.values() for e in found))
    )
    across = _across(len(kinds))
    down = -(-len(kinds) // across)
    figure = new_figure(1.3 + _panel(drafts) * across, 0.8 + _height(depths) * down)
    panels = figure.subplots(down, across, squeeze=False)
    for axes in panels.ravel()[len(kinds) :]:
        axes.set_visible(False)
    image, words, norm = None, [], Normalize(0.0, 1.0)
    for axes, kind in zip(panels.ravel(), kinds, strict=False):
        by_depth = {entry.draft_loops: entry for entry in entries[kind]}

        def rate(d: int, k: int, by_depth: Any = by_depth) -> float | None:
            return acceptance_rate(by_depth[d], k) if d in by_depth else None

        image = _heat(axes, drafts, depths, rate, cmap="viridis", norm=norm, percent=True)
        for candidate in preset.config.candidates:
            if candidate.draft_loops in by_depth and candidate.num_speculative_tokens in drafts:
                _frame(axes, drafts, depths, candidate, _THIN)
        axes.set_title(kind, fontsize=10)
        rates = [r for d in depths for k in drafts if (r := rate(d, k)) is not None]
        words.append(f"{kind} from {min(rates):.0%} to {max(rates):.0%}")
    bar = figure.colorbar(image, ax=panels.ravel().tolist(), shrink=0.85, **_BAR)
    bar.set_label("accepted / proposed drafts, %")
    bar.set_ticks([0, 0.25, 0.5, 0.75, 1])
    bar.set_ticklabels(["0", "25", "50", "75", "100"])
    _label_outer(panels)
    _frame_legend(figure, {"may be chosen at some B": _THIN})
    alt = (
        "Heat maps of the draft acceptance rate in per cent, by K and d: " + "; ".join(words) + "."
    )
    return Picture("acceptance", figure, alt)


def _heat(
    axes: Any,
    drafts: Sequence[int],
    depths: Sequence[int],
    value: Callable[[int, int], float | None],
    *,
    cmap: str,
    norm: Any,
    scale: Callable[[float], float] = float,
    percent: bool = False,
) -> Any:
    """Draw a heat map with its numbers; return what a colour bar needs."""
    raw = [[value(d, k) for k in drafts] for d in depths]
    colours = [[math.nan if v is None else scale(v) for v in row] for row in raw]
    image = axes.imshow(colours, cmap=cmap, norm=norm, origin="lower", aspect="auto")
    for y, row in enumerate(raw):
        for x, v in enumerate(row):
            if v is None:
                continue
            red, green, blue, _ = image.cmap(image.norm(scale(v)))
            is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
            text = f"{100 * v:.0f}" if percent else f"{v:.2f}"
            axes.text(
                x, y, text, ha="center", va="center", fontsize=8, color="w" if is_dark else "k"
            )
    axes.set_xticks(range(len(drafts)), list(map(str, drafts)))
    axes.set_yticks(range(len(depths)), list(map(str, depths)))
    axes.tick_params(length=0)
    return image


def _mark(axes: Any, drafts: Sequence[int], depths: Sequence[int], point: Point) -> None:
    """Put a frame around a candidate of the configuration, a thicker one around its initial."""
    if point.is_candidate:
        width = _THICK if point.is_initial else _THIN
        _frame(axes, drafts, depths, point.candidate, width)


def _frame(
    axes: Any, drafts: Sequence[int], depths: Sequence[int], candidate: Candidate, width: float
) -> None:
    from matplotlib.patheffects import withStroke

    x = drafts.index(candidate.num_speculative_tokens)
    y = depths.index(candidate.draft_loops)
    left, right, low, high = x - 0.46, x + 0.46, y - 0.44, y + 0.44
    axes.plot(
        [left, right, right, left, left],
        [low, low, high, high, low],
        color="k",
        linewidth=width,
        path_effects=[withStroke(linewidth=width + 1.6, foreground="w")],
    )


def _ticks(norm: Any) -> list[float]:
    """Return round speed-ups for the colour bar, 1 among them, none too near to another."""
    kept = [1.0]
    for tick in _TICKS:
        place = norm(math.log(tick))
        if 0 <= place <= 1 and all(abs(place - norm(math.log(k))) > 0.07 for k in kept):
            kept.append(tick)
    return sorted(kept)


def _label_outer(panels: Any) -> None:
    """Name the axes at the left, and below the last panel of each column."""
    for column in panels.T:
        [axes for axes in column if axes.get_visible()][-1].set_xlabel("K, drafted tokens")
    for row in panels:
        row[0].set_ylabel("d, loops of a draft")


def _frame_legend(figure: Any, widths: Mapping[str, float]) -> None:
    """Say below what frames of these widths mean."""
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor="none", edgecolor=INK, linewidth=width, label=label)
        for label, width in widths.items()
    ]
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        handlelength=1.2,
        handleheight=1.1,
    )


def _across(count: int) -> int:
    """Return how many panels to put beside each other: as many as fit, or fewer if that leaves no
    hole."""
    most = min(count, _ACROSS)
    return next((n for n in range(most, 1, -1) if count % n == 0), most)


def _place(point: Point) -> tuple[int, int]:
    return point.candidate.draft_loops, point.candidate.num_speculative_tokens


def _panel(drafts: Sequence[int]) -> float:
    return max(1.6, 0.4 * len(drafts) + 0.3)


def _height(depths: Sequence[int]) -> float:
    return max(1.5, 0.38 * len(depths) + 0.7)
