"""What every training run is made of: the model, the text of a step, and the schedule."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from looped_spec.errors import ConfigError

VOCAB_SIZE = 1024
"""Tokens of every bundled demo."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """One run, reproducible on the same machine with the same number of threads.

    `model` is config.json of the model. A step sees `tokens_per_step` tokens: in rows of
    `row_tokens`, and every `long_row_every`-th step in rows of `long_row_tokens`, all that the
    model takes, so that late positions are trained too. `compiled` runs the forward and backward
    passes through torch.compile, which fuses what is bound by memory: about five times as fast on
    two cores.
    """

    model: Mapping[str, Any]
    steps: int
    seed: int = 0
    tokens_per_step: int = 3072
    row_tokens: int = 256
    long_row_tokens: int = 1024
    long_row_every: int = 4
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    warmup_steps: int = 80
    clip_norm: float = 1.0
    autocast: bool = True
    compiled: bool = False

    may_change: ClassVar[frozenset[str]] = frozenset({"steps"})
    """Names that a resumed run may give other values than the one that was stopped."""

    def __post_init__(self) -> None:
        for name in ("steps", "tokens_per_step", "row_tokens", "long_row_every", "warmup_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.learning_rate <= 0:
            raise ConfigError(f"learning_rate must be above 0, got {self.learning_rate}")
        for length in (self.row_tokens, self.long_row_tokens):
            if self.tokens_per_step % length:
                raise ConfigError(
                    f"tokens_per_step must be a multiple of the row length {length}, "
                    f"got {self.tokens_per_step}"
                )

    def row_length(self, step: int) -> int:
        """Return how many tokens a row of this step has."""
        is_long = step % self.long_row_every == self.long_row_every - 1
        return self.long_row_tokens if is_long else self.row_tokens

    def precision(self) -> AbstractContextManager[None]:
        """Return the context that forward passes run in: bf16 products unless told otherwise."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self.autocast)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON values."""
        return {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()}
