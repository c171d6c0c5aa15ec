"""A whole layer in one call: its weights and its rows as the compiled kernels take them."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from looped_spec.layers.native.build import load_library
from looped_spec.layers.native.linear import Norm, Tiles, check_memory


class _Weights(ctypes.Structure):
    """`struct layer` of branches.c."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("before_attention", "after_attention", "before_mlp", "after_mlp"),
                *("qkv", "o", "gate_up", "down"),
            )
        ),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("size", "heads", "kv_heads", "head_dim", "inner"),
                *("qkv_is_bf16", "o_is_bf16", "gate_up_is_bf16", "down_is_bf16"),
            )
        ),
        *(
            (f"eps_{name}", ctypes.c_double)
            for name in ("before_attention", "after_attention", "before_mlp", "after_mlp")
        ),
        ("scale", ctypes.c_double),
    )


class _Rows(ctypes.Structure):
    """`struct rows` of branches.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("slots", "tables", "positions", "cos", "sin")),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("batch", "length", "block_size", "width"),
                *("slot_request", "slot_row", "table_stride", "position_stride"),
                *("angle_request", "angle_row"),
            )
        ),
    )


class NativeRows:
    """Rows of requests and where they lie in the cache, for layers in one call."""

    def __init__(self, slots: Tensor, tables: Tensor, positions: Tensor, block_size: int) -> None:
        """Take slots and positions [B, T] int64 and tables [B, W] int64 with contiguous rows."""
        self._held: tuple[Tensor, ...] = (slots, tables, positions)
        self._angles: tuple[Tensor, Tensor] | None = None
        batch, length = positions.shape
        self._rows = _Rows(
            slots.data_ptr(),
            tables.data_ptr(),
            positions.data_ptr(),
            None,
            None,
            batch,
            length,
            block_size,
            tables.shape[1],
            *slots.stride(),
            tables.stride(0),
            positions.stride(0),
        )
        self._reference = ctypes.byref(self._rows)

    def with_angles(self, cos: Tensor, sin: Tensor) -> Any:
        """Return what C takes, with the angles of `RotaryAngles.cos_sin`, of equal strides."""
        held = self._angles
        if held is None or held[0] is not cos or held[1] is not sin:
            self._angles = cos, sin
            rows = self._rows
            rows.cos, rows.sin = cos.data_ptr(), sin.data_ptr()
            rows.angle_request, rows.angle_row = cos.stride()[:2]
        return self._reference


class NativeLayer:
    """The weights of a layer: x + n2(attn(n1 x)), then x + n4(mlp(n3 x)); n2 and n4 may miss."""

    def __init__(
        self,
        heads: tuple[int, int, int],
        tiles: tuple[Tiles, Tiles, Tiles, Tiles],
        norms: tuple[Norm, Norm | None, Norm, Norm | None],
    ) -> None:
        """Take the numbers of heads, of key/value heads and of channels of a head, the weights of
        qkv, o, gate_up and down, and the norms in order.

        Raises:
            BuildError: the kernels cannot be compiled here.
        """
        self._call = load_library().decoder_layer
        self._call.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_int]
        self._call.restype = ctypes.c_int
        self._held = tiles, norms
        self._weights = _Weights(
            *(None if norm is None else norm[0].data_ptr() for norm in norms),
            *(each.pointer for each in tiles),
            tiles[0].inputs,
            *heads,
            tiles[3].inputs,
            *(each.is_bf16 for each in tiles),
            *(0.0 if norm is None else norm[1] for norm in norms),
            heads[2] ** -0.5,
        )
        self._reference = ctypes.byref(self._weights)

    def __deepcopy__(self, _: Any) -> None:
        return None  # a copy of the layer has other norms

    def __call__(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        rows: NativeRows,
        k_pages: Tensor,
        v_pages: Tensor,
    ) -> Tensor:
        """Return the layer of x ([B, T, size] fp32, contiguous); write keys and values to the
        pages."""
        out = torch.empty_like(x)
        failed = self._call(
            out.data_ptr(),
            x.data_ptr(),
            self._reference,
            rows.with_angles(*rotary),
            k_pages.data_ptr(),
            v_pages.data_ptr(),
            torch.get_num_threads(),
        )
        check_memory(failed)
        return out
