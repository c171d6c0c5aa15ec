"""Kernels of our own for the CPU, compiled where they run."""

from __future__ import annotations

from torch import nn

from looped_spec.layers.kernels import LayerKernels, TakesKernels
from looped_spec.layers.native.build import BuildError
from looped_spec.layers.native.kernels import Kernels
from looped_spec.layers.native.layer import NativeLayer, NativeRows
from looped_spec.layers.native.linear import LinearKernels, Tiles

__all__ = [
    "BuildError",
    "Kernels",
    "LinearKernels",
    "NativeLayer",
    "NativeRows",
    "Tiles",
    "use_kernels",
]


def use_kernels(module: nn.Module, kernels: LayerKernels | None) -> int:
    """Let all parts of `module` that take kernels use these, or stop using them where None.

    Returns how many there are.
    """
    parts = [part for part in module.modules() if isinstance(part, TakesKernels)]
    for part in parts:
        part.kernels = kernels
    return len(parts)
