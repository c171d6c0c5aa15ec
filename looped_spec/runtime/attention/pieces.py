"""Attention request by request over keys and values where they lie: for CPUs, without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from looped_spec.runtime.attention.backend import Span

_LEAST_BYTES = 1 << 19
"""Of keys and values per request: below this a call for each costs more than one copy for all."""


@dataclass(frozen=True)
class Pieces:
    """What the planes of a context share.

    A request whose blocks follow each other is read as one slice of the pool, another's pages are
    gathered; either only as far as the request is long.

    Attributes:
        spans: where each request stands.
        tables: [B, W] int64.
        num_rows: T, rows of each request.
        offset: how far its first row stands behind the position of its span.
        mask: [T, M + T] of the pool's dtype, None for T = 1: 0, but -inf where a row of the last T
            positions looks ahead; the last columns serve requests of any length.
    """

    spans: Sequence[Span]
    tables: Tensor
    num_rows: int
    offset: int
    mask: Tensor | None

    @classmethod
    def of(cls, spans: Sequence[Span], tables: Tensor, num_rows: int, dtype: torch.dtype) -> Pieces:
        """Prepare for requests with `num_rows` rows each, from the position of their spans on."""
        mask = None
        if num_rows > 1:
            longest = max([span.position for span in spans]) + num_rows
            ahead = torch.full((num_rows, longest), -torch.inf, dtype=dtype)
            mask = ahead.triu_(longest - num_rows + 1)
        return cls(spans, tables, num_rows, 0, mask)

    @staticmethod
    def pay(spans: Sequence[Span], bytes_per_token: int) -> bool:
        """Whether calls request by request cost less than a copy for all."""
        if len(spans) < 2:
            return bool(spans)
        tokens = sum([span.position for span in spans])
        return tokens * bytes_per_token >= _LEAST_BYTES * len(spans)

    def column(self, index: int) -> Pieces:
        """Keep row `index` of each request."""
        return Pieces(self.spans, self.tables, 1, self.offset + index, None)

    def select(self, places: Sequence[int]) -> Pieces:
        """Keep some of the requests."""
        spans = [self.spans[place] for place in places]
        return Pieces(spans, self.tables[list(places)], self.num_rows, self.offset, self.mask)

    def attend(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, scale: float | None) -> Tensor:
        """Attend; see `AttentionBackend.attend`.

        Queries that share keys and values stand below each other as rows of one head: torch copies
        keys and values for each of them otherwise.
        """
        batch, num_rows, heads, head_dim = q.shape
        kv_heads = k_pages.shape[2]
        group = heads // kv_heads
        q = q.view(batch, num_rows, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(batch, kv_heads, group * num_rows, head_dim)
        parts = []
        for place, span in enumerate(self.spans):
            # What lies behind its own blocks is another's; rows that far are not committed.
            reach = span.position + self.offset + self.num_rows
            length = min(reach, span.capacity)
            mask = self.mask
            if mask is not None:
                first = mask.shape[1] - reach
                mask = mask[:, first : first + length].repeat(group, 1)
            k, v = (self._read(pages, place, span, length) for pages in (k_pages, v_pages))
            own = q[place : place + 1]
            parts.append(F.scaled_dot_product_attention(own, k, v, attn_mask=mask, scale=scale))
        out = torch.cat(parts) if batch > 1 else parts[0]
        out = out.view(batch, kv_heads, group, num_rows, head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(batch, num_rows, heads, head_dim)

    def _read(self, pages: Tensor, place: int, span: Span, length: int) -> Tensor:
        """Return [1, kv_heads, length, head_dim]."""
        _, block_size, kv_heads, head_dim = pages.shape
        if span.block is None:
            pages = pages.index_select(0, self.tables[place, : -(-length // block_size)])
        start = 0 if span.block is None else span.block * block_size
        flat = pages.view(-1, kv_heads, head_dim)
        return flat[start : start + length].transpose(0, 1).unsqueeze(0)
