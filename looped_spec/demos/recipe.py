"""What a family adds to the trainer: where weights start, and what is learned."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from looped_spec.adapter import ModelAdapter
from looped_spec.demos.settings import TrainSettings

S = TypeVar("S", bound=TrainSettings)


class Stage(ABC):
    """A part of the run: its length, its optimizer's settings, and its loss."""

    name: str
    steps: int
    groups: Sequence[dict[str, Any]]
    """Parameter groups of AdamW; a group without `lr` follows the schedule of the run, times
    `rate_scale` where it has one."""
    clip_norm: float | None = None
    """Where the norm of all gradients of `groups` is cut; None for nowhere."""

    @abstractmethod
    def loss(self, rows: Tensor, step: int, part: int) -> tuple[Tensor, Tensor]:
        """Return the loss of rows [B, T + 1] (nats, a scalar), and numbers to show [n].

        `step` counts over the whole run, `part` over the pieces that a step is computed in; any
        randomness is a function of these and of the run's seed.
        """


class Recipe(ABC, Generic[S]):
    """How one family's demo is trained.

    Attributes:
        name: the adapter's name; the demo is reached as `demo:<name>`.
        adapter_class: the family's `ModelAdapter`.
        defaults: the settings that the bundled demo was trained with.
        folder: where the bundled demo lies.
        flags: settings of this family that the command line offers, whole numbers all.
    """

    name: str
    adapter_class: type[ModelAdapter]
    defaults: S
    folder: Path
    flags: tuple[str, ...] = ()

    def build(self, settings: S) -> ModelAdapter:
        """Return an adapter with its weights filled from the run's seed."""
        adapter = self.adapter_class(settings.model, {})
        self.initialize(adapter, settings)
        return adapter

    @abstractmethod
    def initialize(self, adapter: ModelAdapter, settings: S) -> None:
        """Fill all weights from `settings.seed`."""

    @abstractmethod
    def stages(self, adapter: ModelAdapter, settings: S) -> Sequence[Stage]:
        """Return the parts of the run in their order."""


def body_groups(
    parameters: dict[str, nn.Parameter], embedding: str, weight_decay: float
) -> list[dict[str, Any]]:
    """Return two groups: matrices but the embedding, which decay, and all else, which does not."""
    decays = {name for name, p in parameters.items() if p.ndim == 2 and name != embedding}
    return [
        {
            "params": [p for name, p in parameters.items() if name in decays],
            "weight_decay": weight_decay,
        },
        {
            "params": [p for name, p in parameters.items() if name not in decays],
            "weight_decay": 0.0,
        },
    ]
