"""Pictures of a load: tokens per second, K and d over time, for the ways that are worth a line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from looped_spec.offline.figures import COLOURS, GREY, new_figure, save
from looped_spec.offline.load_policy import NEVER

_ROWS = (
    ("output_throughput", "tokens/s"),
    ("num_speculative_tokens", "K, draft tokens"),
    ("draft_loops", "d, draft loops"),
    ("batch_size", "B, requests"),
)


def plot_scenarios(scenarios: Sequence[Mapping[str, Any]], path: Path) -> list[Path]:
    """Draw a picture of each scenario that has been measured and return their files: `path`, or
    `path` with a number each where there are several."""
    drawn = [scenario for scenario in scenarios if shown_ways(scenario)]
    paths = []
    for number, scenario in enumerate(drawn, start=1):
        file = path if len(drawn) == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
        figure = new_figure(10, 7.5)
        draw_scenario(figure, scenario)
        save(figure, file)
        paths.append(file)
    return paths


def shown_ways(scenario: Mapping[str, Any]) -> list[str]:
    """Return the ways to draw: plain decoding, the best static one, ema and goodput."""
    best = [row["policy"] for row in scenario["results"] if row["is_best_static"]]
    wanted = [NEVER, *best, "ema", "goodput", "goodput:warm"]
    return [name for name in dict.fromkeys(wanted) if name in scenario["timelines"]]


def draw_scenario(figure: Any, scenario: Mapping[str, Any], *, title: bool = True) -> None:
    """Draw the first run of each way of `shown_ways` into a matplotlib figure."""
    panels = figure.subplots(len(_ROWS), 1, sharex=True, height_ratios=(3, 2, 2, 1))
    best = {row["policy"] for row in scenario["results"] if row["is_best_static"]}
    for number, name in enumerate(shown_ways(scenario)):
        colour = GREY if name == NEVER else COLOURS[(number - 1) % len(COLOURS)]
        line = scenario["timelines"][name]
        label = f"{name} (best static)" if name in best else name
        for axes, (key, _) in zip(panels, _ROWS, strict=True):
            values = [math.nan if value is None else value for value in line[key]]
            axes.plot(
                line["seconds"],
                values,
                color=colour,
                linewidth=1.6,
                linestyle="--" if name in best or name == NEVER else "-",
                drawstyle="default" if key == "output_throughput" else "steps-mid",
                label=label,
            )
    for axes, (_, label) in zip(panels, _ROWS, strict=True):
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        if label is not _ROWS[0][1]:
            axes.set_ylim(bottom=-0.12, top=1.08 * max(axes.get_ylim()[1], 1))
            axes.yaxis.get_major_locator().set_params(integer=True)
        axes.margins(x=0.01)
        axes.grid(color=GREY, alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=5, frameon=False, fontsize=9)
    if title:
        panels[0].set_title(f"{scenario['profile']}, {scenario['mixture']}", loc="left")
    panels[-1].set_xlabel("seconds since the first request")


def alt_text(scenario: Mapping[str, Any]) -> str:
    """Say in words what the picture of a scenario shows."""
    parts = []
    for name in shown_ways(scenario):
        line = scenario["timelines"][name]
        speeds = [value for value in line["output_throughput"] if value is not None]
        lengths = [value for value in line["num_speculative_tokens"] if value is not None]
        span = f"{min(speeds):.0f} to {max(speeds):.0f} tokens/s" if speeds else "no tokens"
        drafts = f", K from {min(lengths):.1f} to {max(lengths):.1f}" if lengths else ""
        parts.append(f"{name}: {span}{drafts}, done after {line['seconds'][-1]:.1f} s")
    return (
        f"Tokens per second, K, d and batch size over time under {scenario['profile']} with "
        f"{scenario['mixture']} texts. {'; '.join(parts)}."
    )
