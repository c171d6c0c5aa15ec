"""What kernels of our own may do for the layers, whatever they are written in."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class TakesKernels:
    """A part of a model that lets kernels do what they can; None leaves all to PyTorch."""

    kernels: LayerKernels | None = None


class LayerKernels(Protocol):
    """Stands for several operations of PyTorch each; layers keep the plain ones beside it."""

    def serves(self, x: Tensor) -> bool:
        """Tell whether `x` is a tensor that the kernels take."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x / sqrt(mean(x ** 2) + eps) * weight over the last axis; x is contiguous."""
        ...

    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return residual + rms_norm(x); both are contiguous."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up [..., n] of gate and up side by side ([..., 2 n], contiguous)."""
        ...

    def rotate_(self, x: Tensor, heads: int, cos: Tensor, sin: Tensor) -> None:
        """Rotate the first `heads` heads of x ([B, T, all heads, head_dim], contiguous) in
        place."""
        ...
