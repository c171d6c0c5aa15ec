"""What the stages see of the cache (`PagedContext`), and the backends that compute attention over
it."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from looped_spec.adapter import PerRow
from looped_spec.errors import ConfigError, closest
from looped_spec.runtime.kv_cache import TRASH_BLOCK, KVPool


@dataclass(frozen=True)
class PagedRows:
    """Which requests the rows of a call belong to.

    Attributes:
        block_tables: [B, W] int64, the blocks of each request in order; unused columns hold the
            trash block.
        limits: [B] int64, positions from here on write to the trash block.
        seeds: [B] int64, the requests' seeds.
    """

    block_tables: Tensor
    limits: Tensor
    seeds: Tensor


class AttentionBackend(ABC):
    """Attention of new rows over the pages of their own requests. A position sees itself and all
    before it."""

    name: str

    @abstractmethod
    def prepare(self, positions: Tensor, rows: PagedRows, pool: KVPool) -> Any:
        """Compute what all planes share: called once per context."""

    @abstractmethod
    def column(self, prepared: Any, index: int) -> Any:
        """Return what `prepare` would give for row `index` of each request alone."""

    @abstractmethod
    def select(self, prepared: Any, requests: Tensor) -> Any:
        """Return what `prepare` would give for some of the requests ([N] int64) alone."""

    @abstractmethod
    def attend(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, prepared: Any, scale: float | None
    ) -> Tensor:
        """Attend q ([B, T, heads, head_dim]) over pages [num_blocks, block_size, kv_heads,
        head_dim]."""


class SdpaBackend(AttentionBackend):
    """The reference, for any device: gathers each request's pages and calls torch's own
    attention."""

    name = "sdpa"

    def prepare(self, positions: Tensor, rows: PagedRows, pool: KVPool) -> tuple[Tensor, Tensor]:
        """Return the flat table [B * W] and the additive mask [B, 1, T, W * block_size] (0 or
        -inf)."""
        width = rows.block_tables.shape[1] * pool.block_size
        key_positions = torch.arange(width, device=positions.device)
        hidden = key_positions > positions[:, None, :, None]
        mask = torch.zeros(hidden.shape, dtype=pool.dtype, device=positions.device)
        return rows.block_tables.reshape(-1), mask.masked_fill_(hidden, -torch.inf)

    def column(self, prepared: Any, index: int) -> tuple[Tensor, Tensor]:
        """Keep the table and one row of the mask."""
        table, mask = prepared
        return table, mask[:, :, index : index + 1]

    def select(self, prepared: Any, requests: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the tables and masks of some requests."""
        table, mask = prepared
        return table.view(mask.shape[0], -1)[requests].reshape(-1), mask[requests]

    def attend(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, prepared: Any, scale: float | None
    ) -> Tensor:
        """Gather, then scaled-dot-product attention with a mask; grouped queries where heads
        differ."""
        table, mask = prepared
        batch, _, heads, head_dim = q.shape
        kv_heads = k_pages.shape[2]
        k, v = (
            pages.index_select(0, table).view(batch, -1, kv_heads, head_dim).transpose(1, 2)
            for pages in (k_pages, v_pages)
        )
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, attn_mask=mask, scale=scale, enable_gqa=heads != kv_heads
        )
        return out.transpose(1, 2)


_BACKENDS: dict[str, type[AttentionBackend]] = {SdpaBackend.name: SdpaBackend}


def make_backend(name: str) -> AttentionBackend:
    """Return the backend called `name`; `auto` takes the best one for this machine."""
    if name == "auto":
        return SdpaBackend()
    if name not in _BACKENDS:
        known = ["auto", *_BACKENDS]
        raise ConfigError(
            f"attention_backend must be one of {', '.join(known)}, "
            f"got '{name}'{closest(name, known)}"
        )
    return _BACKENDS[name]()


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
        part._per_row = {}
        part._whole, part._narrow = self, narrow
        return part

    def attend(
        self, plane: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None
    ) -> Tensor:
        """Write k, v into `plane` and attend over it; see `StageContext.attend`."""
        self._pool.write(plane, self._slots.reshape(-1), k, v)
        return self._backend.attend(q, *self._pool.planes[plane], self._prepared, scale)

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
    block = torch.where(positions < rows.limits[:, None], block, TRASH_BLOCK)
    return block * block_size + positions % block_size
