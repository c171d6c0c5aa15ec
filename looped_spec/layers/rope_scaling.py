"""Rotary frequencies of models whose context was lengthened after training."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from looped_spec.errors import ModelLoadError


@dataclass(frozen=True)
class Llama3Scaling:
    """The rule of Llama 3.1 and later (`rope_type` "llama3" in config.json).

    A channel that turns at least `high_freq_factor` times within the original context keeps its
    frequency, one that turns at most `low_freq_factor` times has it divided by `factor`, and those
    between are blended. Lengths are tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        if not self.low_freq_factor < self.high_freq_factor:
            raise ModelLoadError(
                "config.json: low_freq_factor of a llama3 rope scaling must be below "
                f"high_freq_factor = {self.high_freq_factor}, got {self.low_freq_factor}"
            )

    def __call__(self, inv_freq: Tensor) -> Tensor:
        """Return the scaled inverse frequencies, of the shape of `inv_freq` (fp32)."""
        turns = self.original_max_position_embeddings * inv_freq / (2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        kept = torch.clamp((turns - low) / (high - low), 0.0, 1.0)
        return inv_freq * (kept + (1.0 - kept) / self.factor)
