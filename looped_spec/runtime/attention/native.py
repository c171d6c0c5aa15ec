"""Attention on the CPU over pages where they lie, without a copy of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from looped_spec.layers.native import Kernels, NativeRows
from looped_spec.runtime.attention.backend import AttentionBackend, PagedRows
from looped_spec.runtime.attention.sdpa import SdpaBackend
from looped_spec.runtime.kv_cache import KVPool

# More rows than this are a prompt: those are a matrix product, at which PyTorch is better.
_MOST_ROWS = 16


@dataclass(frozen=True)
class TableRows:
    """Tables [B, W] int64 and positions [B, T] int64 of few rows."""

    tables: Tensor
    positions: Tensor


class NativeBackend(SdpaBackend):
    """Kernels of our own for rows that are decoded or verified; prompts go as in `SdpaBackend`.

    Each row reads the keys that it sees and no more. Its bits do not depend on the other rows.
    """

    name = "native"

    def __init__(self, kernels: Kernels | None = None) -> None:
        """Use these kernels, or load them.

        Raises:
            BuildError: they cannot be compiled here.
        """
        self._kernels = Kernels() if kernels is None else kernels

    def wants_spans(self, device: torch.device) -> bool:
        """No: tables and positions are enough."""
        return False

    def context_of(self, lengths: Sequence[int]) -> int:
        """Return the mean: no row reads what another one is longer."""
        return AttentionBackend.context_of(self, lengths)

    def prepare(self, positions: Tensor, rows: PagedRows, pool: KVPool) -> Any:
        """Keep tables and positions as they are, where there are few rows."""
        if positions.shape[1] > _MOST_ROWS:
            return super().prepare(positions, rows, pool)
        return TableRows(_in_rows(rows.block_tables), positions)

    def column(self, prepared: Any, index: int) -> Any:
        """Keep the tables and one position of each request."""
        if not isinstance(prepared, TableRows):
            return super().column(prepared, index)
        return TableRows(prepared.tables, prepared.positions[:, index : index + 1])

    def select(self, prepared: Any, requests: Tensor) -> Any:
        """Keep the tables and positions of some requests."""
        if not isinstance(prepared, TableRows):
            return super().select(prepared, requests)
        return TableRows(prepared.tables[requests], prepared.positions[requests])

    def native_rows(self, prepared: Any, slots: Tensor, pool: KVPool) -> NativeRows | None:
        """Return few rows of fp32."""
        if not isinstance(prepared, TableRows) or pool.dtype is not torch.float32:
            return None
        return NativeRows(slots, prepared.tables, prepared.positions, pool.block_size)

    def write(self, pool: KVPool, plane: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Copy rows that are contiguous each; see `AttentionBackend.write`."""
        if k.dtype is not torch.float32 or not (_rows_contiguous(k) and _rows_contiguous(v)):
            super().write(pool, plane, slots, k, v)
            return
        self._kernels.write_pages(*pool.planes[plane], slots, k, v)

    def attend(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, prepared: Any, scale: float | None
    ) -> Tensor:
        """Read the pages in place; see `AttentionBackend.attend`."""
        if not isinstance(prepared, TableRows):
            return super().attend(q, k_pages, v_pages, prepared, scale)
        if not _rows_contiguous(q):
            q = q.contiguous()
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return self._kernels.attend(q, k_pages, v_pages, prepared.tables, prepared.positions, scale)


def _rows_contiguous(x: Tensor) -> bool:
    return x.stride(3) == 1 and x.stride(2) == x.shape[3]


def _in_rows(tables: Tensor) -> Tensor:
    return tables if tables.stride(1) == 1 else tables.contiguous()
