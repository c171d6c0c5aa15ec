"""The compiled kernels as functions of tensors."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from looped_spec.layers.native.build import load_library
from looped_spec.layers.native.linear import LinearKernels

_POINTER, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_ARGUMENTS: dict[str, list[Any]] = {
    "rms_norm": [_POINTER] * 3 + [_INT] * 2 + [_DOUBLE],
    "add_rms_norm": [_POINTER] * 4 + [_INT] * 2 + [_DOUBLE],
    "silu_mul": [_POINTER] * 2 + [_INT] * 2,
    "rotate": [_POINTER] * 3 + [_INT] * 7,
    "write_pages": [_POINTER] * 5 + [_INT] * 9,
    "attend": [_POINTER] * 6 + [_INT] * 11 + [_DOUBLE, ctypes.c_int],
}


class Kernels(LinearKernels):
    """Pieces of a layer for fp32 tensors on the CPU, without gradients.

    Each has a plain version that it is tested against: `RMSNorm`, `SwiGLU`, `apply_rotary`,
    `KVPool.write` and `SdpaBackend`.
    """

    def __init__(self) -> None:
        """Compile the library, or take it from the cache.

        Raises:
            BuildError: it cannot be compiled here.
        """
        super().__init__()
        library = load_library()
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = ctypes.c_int if name == "attend" else None
            setattr(self, f"_{name}", function)

    _rms_norm: Any
    _add_rms_norm: Any
    _silu_mul: Any
    _rotate: Any
    _write_pages: Any
    _attend: Any

    def __deepcopy__(self, _: Any) -> Kernels:
        return self

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x / sqrt(mean(x ** 2) + eps) * weight over the last axis; x is contiguous."""
        out, size = torch.empty_like(x), x.shape[-1]
        self._rms_norm(
            out.data_ptr(), x.data_ptr(), weight.data_ptr(), x.numel() // size, size, eps
        )
        return out

    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return residual + rms_norm(x); both are contiguous."""
        out, size = torch.empty_like(x), x.shape[-1]
        self._add_rms_norm(
            out.data_ptr(),
            residual.data_ptr(),
            x.data_ptr(),
            weight.data_ptr(),
            x.numel() // size,
            size,
            eps,
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up [..., n] of gate and up side by side ([..., 2 n], contiguous)."""
        size = gate_up.shape[-1] // 2
        out = gate_up.new_empty((*gate_up.shape[:-1], size))
        self._silu_mul(out.data_ptr(), gate_up.data_ptr(), gate_up.numel() // (2 * size), size)
        return out

    def rotate_(self, x: Tensor, heads: int, cos: Tensor, sin: Tensor) -> None:
        """Rotate the first `heads` heads of x ([B, T, all heads, head_dim], contiguous) in place.

        `cos` and `sin` are those of `RotaryAngles.cos_sin`, of equal strides.
        """
        batch, length, all_heads, head_dim = x.shape
        self._rotate(
            x.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            batch,
            length,
            heads,
            head_dim,
            all_heads * head_dim,
            *cos.stride()[:2],
        )

    def write_pages(
        self, k_pages: Tensor, v_pages: Tensor, slots: Tensor, k: Tensor, v: Tensor
    ) -> None:
        """Write k and v ([B, T, kv_heads, head_dim], a row contiguous) to flat slots ([B, T]
        int64)."""
        batch, length, kv_heads, head_dim = k.shape
        self._write_pages(
            k_pages.data_ptr(),
            v_pages.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            slots.data_ptr(),
            batch,
            length,
            kv_heads * head_dim,
            *k.stride()[:2],
            *v.stride()[:2],
            *slots.stride(),
        )

    def attend(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        tables: Tensor,
        positions: Tensor,
        scale: float,
    ) -> Tensor:
        """Attend q ([B, T, heads, head_dim], a row contiguous) over pages, by tables ([B, W]
        int64) and the first of the positions ([B, T] int64) of each request."""
        batch, length, heads, head_dim = q.shape
        block_size, kv_heads = k_pages.shape[1:3]
        width = tables.shape[1]
        out = torch.empty(q.shape, dtype=q.dtype)
        failed = self._attend(
            out.data_ptr(),
            q.data_ptr(),
            k_pages.data_ptr(),
            v_pages.data_ptr(),
            tables.data_ptr(),
            positions.data_ptr(),
            batch,
            length,
            heads,
            kv_heads,
            head_dim,
            block_size,
            width,
            *q.stride()[:2],
            tables.stride(0),
            positions.stride(0),
            scale,
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("no memory for the weights of attention")
        return out
