"""Linear layers whose rows come from several checkpoint tensors, and the layout that follows."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from looped_spec.adapter import WeightTarget


class MergedLinear(nn.Linear):
    """Several projections of the same input as one matrix without bias: [..., in] to [..., sum].

    `parts` gives the rows of each projection by the name that it has in checkpoints, in order; in
    them the projections stand beside each other where this layer stands.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int]) -> None:
        super().__init__(in_features, sum(parts.values()), bias=False)
        self.parts = dict(parts)


def merged_layout(module: nn.Module) -> dict[str, WeightTarget]:
    """Map checkpoint names to places: a `MergedLinear` takes its parts, all others their name."""
    merged = {
        f"{name}.weight": (name.rpartition(".")[0], layer.parts)
        for name, layer in module.named_modules()
        if isinstance(layer, MergedLinear)
    }
    layout: dict[str, WeightTarget] = {}
    for name in module.state_dict():
        if name not in merged:
            layout[name] = WeightTarget(name)
            continue
        owner, parts = merged[name]
        start = 0
        for part, rows in parts.items():
            official = f"{owner}.{part}.weight" if owner else f"{part}.weight"
            layout[official] = WeightTarget(name, start, start + rows)
            start += rows
    return layout
