"""torch's own variable-length attention, which takes block tables in newer releases of PyTorch."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from looped_spec.runtime.attention.backend import AttentionBackend, AttentionNeeds, PagedRows
from looped_spec.runtime.attention.lengths import LengthRows
from looped_spec.runtime.kv_cache import KVPool

_BLOCK_MULTIPLE = 256
"""What the flash-attention 2 inside PyTorch wants of a block's tokens."""


@dataclass(frozen=True)
class PackedRows:
    """Tables and lengths of B requests, and where the rows of each begin once all are packed.

    Attributes:
        requests: [B + 1] int32, 0 to B: where rows begin that are one per request.
        starts: [B + 1] int32, where they begin here.
    """

    lengths: LengthRows
    requests: Tensor
    starts: Tensor

    @property
    def num_rows(self) -> int:
        """T, the rows of each request."""
        return self.lengths.lengths.shape[0]


class VarlenBackend(AttentionBackend):
    """`torch.nn.attention.varlen.varlen_attn` over pages.

    It never reads a context in several parts: the flash-attention in some releases of PyTorch mixes
    the parts of paged rows up (Dao-AILab/flash-attention, pull request 2550).
    """

    name = "varlen"
    default_block_size = _BLOCK_MULTIPLE

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @classmethod
    def unsupported_reason(cls, needs: AttentionNeeds) -> str | None:
        """Ask torch for a function with block tables; see `AttentionBackend.unsupported_reason`."""
        if needs.device.type != "cuda":
            return "it needs a CUDA device"
        if needs.dtype not in (torch.float16, torch.bfloat16):
            name = str(needs.dtype).removeprefix("torch.")
            return f"it computes in bfloat16 and float16, not in {name}"
        if needs.capability < 8:
            return f"it has no kernel for compute capability {needs.capability}.x"
        wrong = [dim for dim in sorted(needs.head_dims) if dim % 8 or dim > 256]
        if wrong:
            return f"it wants heads of a multiple of 8 up to 256, not of {wrong[0]}"
        if needs.block_size is not None and needs.block_size % _BLOCK_MULTIPLE:
            return (
                f"it wants a block_size that is a multiple of {_BLOCK_MULTIPLE}, "
                f"not {needs.block_size}"
            )
        if needs.num_splits > 1:
            return f"it reads a context in one part, not in {needs.num_splits}"
        function = _varlen_attn()
        if function is None or not takes_block_tables(function):
            return f"varlen_attn of PyTorch {torch.__version__} takes no block tables, 2.13 does"
        return None

    @classmethod
    def create(cls, needs: AttentionNeeds) -> VarlenBackend:
        """Take torch's function; see `AttentionBackend.create`."""
        function = _varlen_attn()
        assert function is not None, "unsupported_reason comes first"
        return cls(function)

    def prepare(self, positions: Tensor, rows: PagedRows, pool: KVPool) -> PackedRows:
        """Convert tables and positions."""
        batch, length = positions.shape
        requests = torch.arange(batch + 1, dtype=torch.int32, device=positions.device)
        lengths = LengthRows.of(positions, rows, pool.block_size)
        return PackedRows(lengths, requests, requests * length)

    def column(self, prepared: Any, index: int) -> PackedRows:
        """Keep one row of each request."""
        one_each: Tensor = prepared.requests
        return PackedRows(prepared.lengths.column(index), one_each, one_each)

    def select(self, prepared: Any, requests: Tensor) -> PackedRows:
        """Keep some of the requests."""
        bounds = slice(len(requests) + 1)
        return PackedRows(
            prepared.lengths.select(requests), prepared.requests[bounds], prepared.starts[bounds]
        )

    def attend(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, prepared: Any, scale: float | None
    ) -> Tensor:
        """Call torch; see `AttentionBackend.attend`."""
        out: Tensor = self._function(
            q.reshape(-1, *q.shape[2:]),
            k_pages,
            v_pages,
            prepared.starts,
            None,
            prepared.num_rows,
            prepared.lengths.tables.shape[1] * k_pages.shape[1],
            scale=scale,
            window_size=(-1, 0),
            enable_gqa=q.shape[2] != k_pages.shape[2],
            seqused_k=prepared.lengths.last,
            block_table=prepared.lengths.tables,
            num_splits=1,
        )
        return out.view(q.shape)


def takes_block_tables(function: Callable[..., Any]) -> bool:
    """Whether this `varlen_attn` has the arguments that are used here, and needs no others."""
    known = inspect.signature(function).parameters
    used = {"scale", "window_size", "enable_gqa", "seqused_k", "block_table", "num_splits"}
    return used <= set(known) and "None" in str(known["cu_seq_k"].annotation)


def _varlen_attn() -> Callable[..., Any] | None:
    try:
        module = importlib.import_module("torch.nn.attention.varlen")
    except ImportError:
        return None
    function: Callable[..., Any] | None = getattr(module, "varlen_attn", None)
    return function
