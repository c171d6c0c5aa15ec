"""What kernels of our own may do for the layers, whatever they are written in."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn


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


def computes_as(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Tell whether a module computes what `kind` does, so that kernels may do it in its place: its
    `forward` is that of `kind`, and no hook waits for a call. A missing module does."""
    return module is None or (type(module).forward is kind.forward and not is_hooked(module))


def is_hooked(module: nn.Module) -> bool:
    """Tell whether somebody wants to hear of the calls of a module."""
    return bool(module._forward_hooks or module._forward_pre_hooks)
