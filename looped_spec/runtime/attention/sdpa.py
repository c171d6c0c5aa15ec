"""The reference backend: gathers the pages and calls torch's own attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from looped_spec.runtime.attention.backend import AttentionBackend, AttentionNeeds, PagedRows
from looped_spec.runtime.attention.pieces import Pieces
from looped_spec.runtime.kv_cache import KVPool


class SdpaBackend(AttentionBackend):
    """For any device, dtype, size of head and of block.

    On the CPU it reads long contexts where they lie, request by request, as far as they are long
    (`Pieces`). Elsewhere, and where the host does not know how long they are, it gathers all that
    the tables are wide.
    """

    name = "sdpa"
    cost_follows_width = True

    def wants_spans(self, device: torch.device) -> bool:
        """On the CPU."""
        return device.type == "cpu"

    @classmethod
    def unsupported_reason(cls, needs: AttentionNeeds) -> str | None:
        """Return None: it runs everywhere."""
        return None

    @classmethod
    def create(cls, needs: AttentionNeeds) -> SdpaBackend:
        """Return the backend; it has nothing to split."""
        return cls()

    def prepare(
        self, positions: Tensor, rows: PagedRows, pool: KVPool
    ) -> Pieces | tuple[Tensor, Tensor]:
        """Return pieces, or the flat table [B * W] and the additive mask [B, 1, T, W * block_size]
        (0 or -inf)."""
        if rows.spans and self.wants_spans(positions.device):
            k_pages = pool.planes[0][0]
            bytes_per_token = 2 * k_pages[0, 0].nbytes
            if Pieces.pay(rows.spans, bytes_per_token):
                return Pieces.of(rows.spans, rows.block_tables, positions.shape[1], pool.dtype)
        width = rows.block_tables.shape[1] * pool.block_size
        key_positions = torch.arange(width, device=positions.device)
        hidden = key_positions > positions[:, None, :, None]
        mask = torch.zeros(hidden.shape, dtype=pool.dtype, device=positions.device)
        return rows.block_tables.reshape(-1), mask.masked_fill_(hidden, -torch.inf)

    def column(self, prepared: Any, index: int) -> Pieces | tuple[Tensor, Tensor]:
        """Keep the table and one row of the mask."""
        if isinstance(prepared, Pieces):
            return prepared.column(index)
        table, mask = prepared
        return table, mask[:, :, index : index + 1]

    def select(self, prepared: Any, requests: Tensor) -> Pieces | tuple[Tensor, Tensor]:
        """Keep the tables and masks of some requests."""
        if isinstance(prepared, Pieces):
            return prepared.select(requests.tolist())
        table, mask = prepared
        return table.view(mask.shape[0], -1)[requests].reshape(-1), mask[requests]

    def attend(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, prepared: Any, scale: float | None
    ) -> Tensor:
        """Gather, then scaled-dot-product attention with a mask; grouped queries where heads
        differ."""
        if isinstance(prepared, Pieces):
            return prepared.attend(q, k_pages, v_pages, scale)
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
