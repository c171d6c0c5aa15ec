"""Kernels of our own for the CPU, compiled where they run."""

from __future__ import annotations

from torch import nn

from looped_spec.layers.kernels import LayerKernels
from looped_spec.layers.native.build import BuildError
from looped_spec.layers.native.kernels import Kernels, serves

__all__ = ["BuildError", "Kernels", "serves", "use_kernels"]


def use_kernels(module: nn.Module, kernels: LayerKernels | None) -> int:
    """Let all parts of `module` that know the kernels use them, or stop using them where None.

    Returns how many there are.
    """
    parts = [part for part in module.modules() if hasattr(part, "kernels")]
    for part in parts:
        part.kernels = kernels  # type: ignore[assignment]
    return len(parts)
