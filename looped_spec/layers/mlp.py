"""The gated feed-forward layer of the Llama family."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from looped_spec.layers.kernels import TakesKernels, computes_as
from looped_spec.layers.merged import MergedLinear
from looped_spec.layers.native import LinearKernels
from looped_spec.layers.norm import RMSNorm
from looped_spec.layers.packed import tiles_of


class SwiGLU(nn.Module, TakesKernels):
    """down(silu(gate(x)) * up(x)) without biases; gate and up are merged, gate rows first."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = MergedLinear(
            hidden_size, {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        )
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., hidden] for `x` of that shape, any float dtype."""
        gate_up: Tensor = self.gate_up_proj(x)
        if self.kernels is not None and self.kernels.serves(gate_up):
            inner = self.kernels.silu_mul(gate_up)
        else:
            gate, up = gate_up.chunk(2, dim=-1)
            inner = F.silu(gate)
            # In place where no gradient needs it: of a prompt these are the largest tensors.
            inner = inner * up if torch.is_grad_enabled() else inner.mul_(up)
        out: Tensor = self.down_proj(inner)
        return out

    def branch(self, x: Tensor, before: RMSNorm, after: RMSNorm | None = None) -> Tensor:
        """Return x + after(self(before(x))) of the shape of x, without a norm where `after` is
        None; in one call where kernels of our own have the weights."""
        kernels = self.kernels
        if isinstance(kernels, LinearKernels) and kernels.serves(x):
            gate_up, down = tiles_of(self.gate_up_proj), tiles_of(self.down_proj)
            fits = gate_up is not None and gate_up.inputs == x.shape[-1]
            norms_fit = computes_as(before, RMSNorm) and computes_as(after, RMSNorm)
            stock = norms_fit and computes_as(self, SwiGLU)
            if gate_up is not None and down is not None and fits and stock:
                last = None if after is None else after.parts
                return kernels.gated_branch(x, gate_up, down, before.parts, last)
        out: Tensor = self(before(x))
        return x + out if after is None else after.added(x, out)
