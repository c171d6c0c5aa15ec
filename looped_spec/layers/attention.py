"""Causal self-attention with rotary positions, for any number of key/value heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from looped_spec.adapter import StageContext
from looped_spec.layers.kernels import TakesKernels
from looped_spec.layers.merged import MergedLinear
from looped_spec.layers.rotary import apply_rotary


class RotaryAttention(nn.Module, TakesKernels):
    """Grouped-query attention without biases; its KV plane is chosen by the caller.

    The query width `num_heads * head_dim` need not be the hidden size. Names of the parameters are
    those of the Llama family, with the query, key and value projections merged.
    """

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        kv_rows = num_kv_heads * head_dim
        self.qkv_proj = MergedLinear(
            hidden_size, {"q_proj": num_heads * head_dim, "k_proj": kv_rows, "v_proj": kv_rows}
        )
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], plane: int, ctx: StageContext
    ) -> Tensor:
        """Return [B, T, hidden] for `x` of that shape; `rotary` is of `RotaryAngles.cos_sin`."""
        batch, rows, _ = x.shape
        qkv: Tensor = self.qkv_proj(x).view(batch, rows, -1, self.head_dim)
        heads, kv_heads = self.num_heads, self.num_kv_heads
        # Queries and keys are neighbours in the merged projection, so one rotation serves both.
        if self.kernels is not None and self.kernels.serves(qkv):
            self.kernels.rotate_(qkv, heads + kv_heads, *rotary)
            q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=2)
        else:
            qk, v = torch.split(qkv, [heads + kv_heads, kv_heads], dim=2)
            q, k = torch.split(apply_rotary(qk, *rotary), [heads, kv_heads], dim=2)
        out: Tensor = self.o_proj(ctx.attend(plane, q, k, v).reshape(batch, rows, -1))
        return out
