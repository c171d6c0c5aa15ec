"""Faults in the checkpoint layout."""

from __future__ import annotations

from typing import Any

import torch

from broken.case import BrokenToy
from looped_spec.adapter import WeightTarget
from looped_spec.testing.toy import ToyAdapter

QKV = "prelude.qkv.weight"


class OverlappingRows(BrokenToy):
    """The second part of a merged projection begins one row early."""

    caught_by = (
        "test_the_layout_fills_every_parameter_once",
        "test_a_saved_checkpoint_loads_to_the_same_logits",
    )

    def checkpoint_layout(self) -> dict[str, WeightTarget]:
        layout = super().checkpoint_layout()
        del layout[QKV]
        return {
            **layout,
            "prelude.q.weight": WeightTarget(QKV, 0, 32),
            "prelude.kv.weight": WeightTarget(QKV, 31, 64),
        }


class MissingParameter(BrokenToy):
    """A parameter has no place in the checkpoint."""

    caught_by = (
        "test_the_layout_fills_every_parameter_once",
        "test_a_saved_checkpoint_loads_to_the_same_logits",
    )

    def checkpoint_layout(self) -> dict[str, WeightTarget]:
        layout = super().checkpoint_layout()
        del layout["depth_scale"]
        return layout


class UnknownParameter(BrokenToy):
    """A tensor goes to a parameter that there is not."""

    caught_by = ("test_the_layout_fills_every_parameter_once",)

    def checkpoint_layout(self) -> dict[str, WeightTarget]:
        return {**super().checkpoint_layout(), "head": WeightTarget("head.weight")}


class HasABuffer(BrokenToy):
    """Something computed is kept as a buffer, which loading would leave empty."""

    caught_by = ("test_a_saved_checkpoint_loads_to_the_same_logits",)

    def __init__(self, config: Any, options: Any) -> None:
        super().__init__(config, options)
        self.module.register_buffer("table", torch.zeros(3), persistent=False)


class OptionalWithoutATie(BrokenToy):
    """A checkpoint may lack a parameter that nothing else fills."""

    caught_by = ("test_what_a_checkpoint_may_lack_leaves_no_parameter_empty",)

    def optional_checkpoint_tensors(self) -> frozenset[str]:
        return frozenset({"norm.weight"})


class SwappedRows(BrokenToy):
    """Key and value rows are taken for each other: consistent, but not the published model."""

    caught_by = ("test_the_checkpoint_folder_loads_to_the_same_logits",)
    plugin = "swapped_toy"

    def checkpoint_layout(self) -> dict[str, WeightTarget]:
        return split_layout(self, v=(32, 48), k=(48, 64))


def split_layout(
    adapter: ToyAdapter, k: tuple[int, int] = (32, 48), v: tuple[int, int] = (48, 64)
) -> dict[str, WeightTarget]:
    """Return the layout of a checkpoint that stores query, key and value of the prelude apart."""
    layout = {name: WeightTarget(name) for name in adapter.module.state_dict() if name != QKV}
    rows = {"q": (0, 32), "k": k, "v": v}
    return layout | {f"prelude.{part}": WeightTarget(QKV, *ends) for part, ends in rows.items()}


FAULTS = (
    OverlappingRows,
    MissingParameter,
    UnknownParameter,
    HasABuffer,
    OptionalWithoutATie,
    SwappedRows,
)
