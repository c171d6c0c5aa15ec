"""A stage context without any cache: whole sequences, plain causal attention.

It is the slow oracle that tests compare the engine with, and what demo checkpoints are trained
through.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from looped_spec.adapter import PerRow


class DenseContext:
    """Run whole sequences of equal length from position 0; every plane attends only to rows of this
    call."""

    def __init__(
        self, batch_size: int, num_tokens: int, total_loops: int, seeds: Tensor | None = None
    ) -> None:
        self.positions = torch.arange(num_tokens).expand(batch_size, num_tokens)
        self.seeds = torch.zeros(batch_size, dtype=torch.int64) if seeds is None else seeds
        self.total_loops = total_loops
        self._per_row: dict[str, tuple[Tensor, ...]] = {}

    def per_row(self, name: str, compute: PerRow) -> tuple[Tensor, ...]:
        """Compute once and remember; see `StageContext.per_row`."""
        if name not in self._per_row:
            self._per_row[name] = compute(self.positions, self.seeds)
        return self._per_row[name]

    def attend(
        self, plane: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None
    ) -> Tensor:
        """Attend causally among the rows of this call; `plane` is not used, since nothing is
        kept."""
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            scale=scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return out.transpose(1, 2)

    def logit_rows(self, hidden: Tensor) -> Tensor:
        """Keep all rows."""
        return hidden
