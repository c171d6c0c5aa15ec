"""Causal self-attention with rotary positions, for any number of key/value heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from looped_spec.adapter import StageContext
from looped_spec.layers.kernels import TakesKernels, computes_as
from looped_spec.layers.merged import MergedLinear
from looped_spec.layers.native import LinearKernels
from looped_spec.layers.norm import RMSNorm
from looped_spec.layers.packed import tiles_of
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

    def branch(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        plane: int,
        ctx: StageContext,
        before: RMSNorm,
        after: RMSNorm | None = None,
    ) -> Tensor:
        """Return x + after(self(before(x), ...)) of the shape of x, without a norm where `after` is
        None; in few calls where kernels of our own have the weights."""
        kernels = self.kernels
        if isinstance(kernels, LinearKernels) and kernels.serves(x):
            wide, last = tiles_of(self.qkv_proj), tiles_of(self.o_proj)
            fits = wide is not None and wide.inputs == x.shape[-1]
            norms_fit = computes_as(before, RMSNorm) and computes_as(after, RMSNorm)
            stock = norms_fit and computes_as(self, RotaryAttention)
            if wide is not None and last is not None and fits and stock:
                heads, kv_heads = self.num_heads, self.num_kv_heads
                qkv = kernels.open_attention(x, wide, before.parts, heads + kv_heads, *rotary)
                q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=2)
                attended = ctx.attend(plane, q, k, v).contiguous()
                norm = None if after is None else after.parts
                return kernels.close_branch(x, attended, last, norm)
        out: Tensor = self(before(x), rotary, plane, ctx)
        return x + out if after is None else after.added(x, out)
