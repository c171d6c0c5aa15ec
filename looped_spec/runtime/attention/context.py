"""What the stages see of the cache."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from looped_spec.adapter import PerRow
from looped_spec.layers.native import NativeRows
from looped_spec.runtime.attention.backend import AttentionBackend, PagedRows
from looped_spec.runtime.kv_cache import TRASH_BLOCK, KVPool


class PagedContext:
    """The `StageContext` of rows whose keys and values live in a `KVPool`."""

    def __init__(
        self,
        pool: KVPool,
        backend: AttentionBackend,
        rows: PagedRows,
        positions: Tensor,
        total_loops: int,
        last_rows: Tensor | None = None,
    ) -> None:
        """Describe rows at `positions` ([B, T] int64); `last_rows` ([B] int64) narrows the logits
        to one row each."""
        self.positions = positions
        self.seeds = rows.seeds
        self.total_loops = total_loops
        self._pool = pool
        self._backend = backend
        self._last_rows = last_rows
        self._prepared = backend.prepare(positions, rows, pool)
        self._slots = _slots(positions, rows, pool.block_size)
        self._per_row: dict[str, tuple[Tensor, ...]] = {}
        self._native_rows: NativeRows | None = None
        self._whole: PagedContext | None = None
        self._narrow: Callable[[Tensor], Tensor] = _all_rows

    def column(self, index: int, total_loops: int) -> PagedContext:
        """Return the context of row `index` of each request alone, for a run `total_loops` deep.

        It shares all that was computed for the whole, and costs a few views.
        """
        part = self._part(lambda tensor: tensor[:, index : index + 1])
        part.total_loops = total_loops
        part._prepared = self._backend.column(self._prepared, index)
        return part

    def select(self, requests: Tensor) -> PagedContext:
        """Return the context of some of the requests ([N] int64)."""
        part = self._part(lambda tensor: tensor[requests])
        part.seeds = self.seeds[requests]
        part._prepared = self._backend.select(self._prepared, requests)
        return part

    @property
    def slots(self) -> Tensor:
        """Where the rows write: flat slots, [B, T] int64."""
        return self._slots

    def per_row(self, name: str, compute: PerRow) -> tuple[Tensor, ...]:
        """Compute once for the whole and take this part; see `StageContext.per_row`."""
        if name not in self._per_row:
            if self._whole is None:
                tensors = compute(self.positions, self.seeds)
            else:
                tensors = tuple(map(self._narrow, self._whole.per_row(name, compute)))
            self._per_row[name] = tensors
        return self._per_row[name]

    def _part(self, narrow: Callable[[Tensor], Tensor]) -> PagedContext:
        """Return a context of some rows; `narrow` takes their part of any tensor [B, T, ...]."""
        part = copy.copy(self)
        part.positions, part._slots = narrow(self.positions), narrow(self._slots)
        part._per_row, part._native_rows = {}, None
        part._whole, part._narrow = self, narrow
        return part

    def attend(
        self, plane: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None
    ) -> Tensor:
        """Write k, v into `plane` and attend over it; see `StageContext.attend`."""
        self._backend.write(self._pool, plane, self._slots, k, v)
        return self._backend.attend(q, *self._pool.planes[plane], self._prepared, scale)

    def native_pages(self, plane: int) -> tuple[NativeRows, Tensor, Tensor] | None:
        """Return these rows and the pages of `plane` for a layer in one call, None where the
        backend attends otherwise; see `NativeLayer`."""
        rows = self._native_rows
        if rows is None:
            rows = self._backend.native_rows(self._prepared, self._slots, self._pool)
            if rows is None:
                return None
            self._native_rows = rows
        return rows, *self._pool.planes[plane]

    def logit_rows(self, hidden: Tensor) -> Tensor:
        """Keep the last row of each prompt in prefill, all rows otherwise."""
        if self._last_rows is None:
            return hidden
        batch = torch.arange(hidden.shape[0], device=hidden.device)
        return hidden[batch, self._last_rows].unsqueeze(1)


def _all_rows(tensor: Tensor) -> Tensor:
    return tensor


def _slots(positions: Tensor, rows: PagedRows, block_size: int) -> Tensor:
    """Return [B, T] int64: where each row writes, as block * block_size + offset."""
    column = (positions // block_size).clamp(max=rows.block_tables.shape[1] - 1)
    block = rows.block_tables.gather(1, column)
    block = block.masked_fill(positions >= rows.limits[:, None], TRASH_BLOCK)
    return block * block_size + positions % block_size
