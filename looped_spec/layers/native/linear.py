"""The compiled linear layers, and the branches of a layer around them, as functions of tensors."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from looped_spec.layers.native.build import load_library

_TILE = 32  # rows of a weight that lie together, as in linear.c

_POINTER, _INT, _FLAG, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_double
_ARGUMENTS: dict[str, list[Any]] = {
    "linear": [_POINTER] * 3 + [_INT] * 3 + [_FLAG] * 2,
    "pack_tiles": [_POINTER] * 2 + [_INT] * 2 + [_FLAG],
    "unpack_tiles": [_POINTER] * 2 + [_INT] * 2 + [_FLAG],
    "close_branch": [_POINTER] * 5 + [_INT] * 3 + [_FLAG, _DOUBLE, _FLAG],
    "open_attention": [_POINTER] * 6 + [_INT] * 8 + [_FLAG, _DOUBLE, _FLAG],
    "gated_branch": [_POINTER] * 6 + [_INT] * 3 + [_FLAG] * 2 + [_DOUBLE] * 2 + [_FLAG],
}
_SAYS_NOTHING = ("linear", "unpack_tiles")

Norm = tuple[Tensor, float]
"""Weight and epsilon of an RMSNorm."""


class Tiles:
    """An fp32 weight [outputs, inputs] as `linear` reads it."""

    __slots__ = ("inputs", "is_bf16", "num_bytes", "outputs", "pointer", "words")

    def __init__(self, words: Tensor, outputs: int) -> None:
        """Take what `pack_tiles` has filled: [tiles, in, words] int32."""
        _, self.inputs, size = words.shape
        self.words = words  # keeps the memory
        self.outputs = outputs
        self.is_bf16 = size < _TILE
        self.num_bytes = words.nbytes
        self.pointer = words.data_ptr()


class LinearKernels:
    """Linear layers over `Tiles`, alone and in branches; fp32 on the CPU, without gradients."""

    _linear: Any
    _pack_tiles: Any
    _unpack_tiles: Any
    _close_branch: Any
    _open_attention: Any
    _gated_branch: Any

    def __init__(self) -> None:
        """Compile the library, or take it from the cache.

        Raises:
            BuildError: it cannot be compiled here.
        """
        library = load_library()
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = None if name in _SAYS_NOTHING else ctypes.c_int
            setattr(self, f"_{name}", function)

    @staticmethod
    def serves(x: Tensor) -> bool:
        """Tell whether `x` is a tensor that the kernels take."""
        return (
            x.dtype is torch.float32
            and x.is_cpu
            and x.is_contiguous()
            and not torch.is_grad_enabled()
        )

    def pack_tiles(self, weight: Tensor, *, as_bf16: bool) -> Tiles | None:
        """Lay out an fp32 weight ([out, in], contiguous); None if bf16 lacks one of its numbers."""
        outputs, inputs = weight.shape
        size = _TILE // 2 if as_bf16 else _TILE
        words = torch.empty(-(-outputs // _TILE), inputs, size, dtype=torch.int32)
        arguments = words.data_ptr(), weight.data_ptr(), inputs, outputs, as_bf16
        return Tiles(words, outputs) if self._pack_tiles(*arguments) else None

    def unpack_tiles(self, tiles: Tiles) -> Tensor:
        """Return the fp32 weight [out, in]."""
        weight = torch.empty(tiles.outputs, tiles.inputs, dtype=torch.float32)
        self._unpack_tiles(
            weight.data_ptr(), tiles.pointer, tiles.inputs, tiles.outputs, tiles.is_bf16
        )
        return weight

    def linear(self, x: Tensor, tiles: Tiles) -> Tensor:
        """Return x @ weight.T [..., out] for x [..., in] fp32.

        Raises:
            RuntimeError: `x` is of another width or dtype, or not in memory of the CPU.
        """
        if x.shape[-1] != tiles.inputs or x.dtype is not torch.float32 or not x.is_cpu:
            raise RuntimeError(
                f"x must be float32 [..., {tiles.inputs}] on the CPU, got {x.dtype} "
                f"{list(x.shape)} on {x.device}"
            )
        if not x.is_contiguous():
            x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], tiles.outputs))
        self._linear(
            out.data_ptr(),
            x.data_ptr(),
            tiles.pointer,
            x.numel() // tiles.inputs,
            tiles.inputs,
            tiles.outputs,
            tiles.is_bf16,
            torch.get_num_threads(),
        )
        return out

    def close_branch(self, residual: Tensor, x: Tensor, tiles: Tiles, after: Norm | None) -> Tensor:
        """Return residual + after(x @ weight.T) [..., out]; both tensors are contiguous."""
        out = torch.empty_like(residual)
        weight, eps = after if after is not None else (None, 0.0)
        failed = self._close_branch(
            out.data_ptr(),
            residual.data_ptr(),
            x.data_ptr(),
            tiles.pointer,
            None if weight is None else weight.data_ptr(),
            x.numel() // tiles.inputs,
            tiles.inputs,
            tiles.outputs,
            tiles.is_bf16,
            eps,
            torch.get_num_threads(),
        )
        check_memory(failed)
        return out

    def open_attention(
        self, x: Tensor, tiles: Tiles, before: Norm, heads: int, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Return before(x) @ weight.T [B, T, all heads, head_dim], its first `heads` heads rotated.

        x is contiguous; `cos` and `sin` are those of `RotaryAngles.cos_sin`, of equal strides.
        """
        batch, length, _ = x.shape
        head_dim = cos.shape[-1]
        out = x.new_empty((batch, length, tiles.outputs // head_dim, head_dim))
        weight, eps = before
        failed = self._open_attention(
            out.data_ptr(),
            x.data_ptr(),
            tiles.pointer,
            weight.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            batch,
            length,
            tiles.inputs,
            tiles.outputs,
            heads,
            head_dim,
            *cos.stride()[:2],
            tiles.is_bf16,
            eps,
            torch.get_num_threads(),
        )
        check_memory(failed)
        return out

    def gated_branch(
        self, x: Tensor, gate_up: Tiles, down: Tiles, before: Norm, after: Norm | None
    ) -> Tensor:
        """Return x + after(SwiGLU(before(x))); x is contiguous."""
        out = torch.empty_like(x)
        weight, eps = after if after is not None else (None, 0.0)
        failed = self._gated_branch(
            out.data_ptr(),
            x.data_ptr(),
            gate_up.pointer,
            down.pointer,
            before[0].data_ptr(),
            None if weight is None else weight.data_ptr(),
            x.numel() // gate_up.inputs,
            gate_up.inputs,
            down.inputs,
            gate_up.is_bf16,
            down.is_bf16,
            before[1],
            eps,
            torch.get_num_threads(),
        )
        check_memory(failed)
        return out


def check_memory(failed: int) -> None:
    """Raise `MemoryError` if a kernel says that there was none."""
    if failed:
        raise MemoryError("no memory for the rows of a layer")
