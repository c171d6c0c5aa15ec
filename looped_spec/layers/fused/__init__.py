"""Small kernels in Triton, each in place of several of PyTorch's: for CUDA devices."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from looped_spec.layers.kernels import LayerKernels


class FusedKernels(LayerKernels, Protocol):
    """Those of the layers, and the write to the cache."""

    def write_pages(
        self, k_pages: Tensor, v_pages: Tensor, slots: Tensor, k: Tensor, v: Tensor
    ) -> None:
        """Write k and v ([B, T, kv_heads, head_dim], a row contiguous) to flat slots ([B, T]
        int64)."""
        ...
