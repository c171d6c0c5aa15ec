"""The reference backend: gathers the pages and calls torch's own attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from looped_spec.huge_pages import ask_for_huge_pages
from looped_spec.runtime.attention.backend import AttentionBackend, AttentionNeeds, PagedRows
from looped_spec.runtime.attention.pieces import Pieces
from looped_spec.runtime.kv_cache import KVPool

_GROWTH = 1.25


@dataclass(frozen=True)
class Gather:
    """Pages to be copied together.

    Attributes:
        table: [B * W] int64, blocks of all requests.
        mask: [B, 1, T, W * block_size] of the pool's dtype, 0 or -inf.
        reuses: whether the copies may be made in memory that is kept from call to call.
    """

    table: Tensor
    mask: Tensor
    reuses: bool


class SdpaBackend(AttentionBackend):
    """For any device, dtype, size of head and of block.

    On the CPU it reads long contexts where they lie, request by request, as far as they are long
    (`Pieces`). Elsewhere, and where the host does not know how long they are, it gathers all that
    the tables are wide. On the CPU that is copied to memory which is kept: the C library gives a
    copy of this size back to the system when it is freed, and getting it anew, page by page, took
    longer than all the rest of a round.
    """

    name = "sdpa"
    cost_follows_width = True
    _kept: tuple[Tensor, ...] = ()
    _has_gathered = True

    def wants_spans(self, device: torch.device) -> bool:
        """On the CPU."""
        return device.type == "cpu"

    @classmethod
    def unsupported_reason(cls, needs: AttentionNeeds) -> str | None:
        """Return None: it runs everywhere."""
        return None

    def for_engine(self) -> Self:
        """Return one with memory of its own."""
        other = super().for_engine()
        other._kept, other._has_gathered = (), True
        return other

    def context_of(self, lengths: Sequence[int]) -> int:
        """Return the longest, to which all are padded, unless the newest round read pieces."""
        return max(lengths) if self._has_gathered else super().context_of(lengths)

    @classmethod
    def create(cls, needs: AttentionNeeds) -> SdpaBackend:
        """Return the backend; it has nothing to split."""
        return cls()

    def prepare(self, positions: Tensor, rows: PagedRows, pool: KVPool) -> Pieces | Gather:
        """Return pieces, or what is to be gathered."""
        knows = bool(rows.spans) and self.wants_spans(positions.device)
        if knows:
            k_pages = pool.planes[0][0]
            bytes_per_token = 2 * k_pages[0, 0].nbytes
            self._has_gathered = not Pieces.pay(rows.spans, bytes_per_token)
            if not self._has_gathered:
                return Pieces.of(rows.spans, rows.block_tables, positions.shape[1], pool.dtype)
        width = rows.block_tables.shape[1] * pool.block_size
        key_positions = torch.arange(width, device=positions.device)
        hidden = key_positions > positions[:, None, :, None]
        mask = torch.zeros(hidden.shape, dtype=pool.dtype, device=positions.device)
        table = rows.block_tables.reshape(-1)
        return Gather(table, mask.masked_fill_(hidden, -torch.inf), knows)

    def column(self, prepared: Any, index: int) -> Pieces | Gather:
        """Keep the table and one row of the mask."""
        if isinstance(prepared, Pieces):
            return prepared.column(index)
        mask = prepared.mask[:, :, index : index + 1]
        return Gather(prepared.table, mask, prepared.reuses)

    def select(self, prepared: Any, requests: Tensor) -> Pieces | Gather:
        """Keep the tables and masks of some requests."""
        if isinstance(prepared, Pieces):
            return prepared.select(requests.tolist())
        table = prepared.table.view(prepared.mask.shape[0], -1)[requests].reshape(-1)
        return Gather(table, prepared.mask[requests], prepared.reuses)

    def attend(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, prepared: Any, scale: float | None
    ) -> Tensor:
        """Gather, then scaled-dot-product attention with a mask; grouped queries where heads
        differ."""
        if isinstance(prepared, Pieces):
            return prepared.attend(q, k_pages, v_pages, scale)
        batch, _, heads, head_dim = q.shape
        kv_heads = k_pages.shape[2]
        k, v = (
            pages.view(batch, -1, kv_heads, head_dim).transpose(1, 2)
            for pages in self._gather(k_pages, v_pages, prepared)
        )
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k,
            v,
            attn_mask=prepared.mask,
            scale=scale,
            enable_gqa=heads != kv_heads,
        )
        return out.transpose(1, 2)

    def _gather(self, k_pages: Tensor, v_pages: Tensor, gather: Gather) -> list[Tensor]:
        """Return copies of the pages of a table; such that are reused hold until the next call."""
        both = (k_pages, v_pages)
        if not gather.reuses:
            return [pages.index_select(0, gather.table) for pages in both]
        shapes = [(len(gather.table), *pages.shape[1:]) for pages in both]
        sizes = [math.prod(shape) for shape in shapes]
        if not self._kept or any(
            kept.numel() < size or kept.dtype is not k_pages.dtype
            for kept, size in zip(self._kept, sizes, strict=True)
        ):
            self._kept = ()  # before the new ones are there
            with torch.inference_mode(False):  # so that they can be written to outside of it
                self._kept = tuple(
                    torch.empty(int(_GROWTH * size), dtype=k_pages.dtype) for size in sizes
                )
            for kept in self._kept:
                ask_for_huge_pages(kept)
        return [
            torch.index_select(pages, 0, gather.table, out=kept[:size].view(shape))
            for pages, kept, size, shape in zip(both, self._kept, sizes, shapes, strict=True)
        ]
