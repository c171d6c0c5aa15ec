"""Random caches with rows that attend over them, and the slow plain answer."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from looped_spec.runtime.attention import (
    AttentionBackend,
    AttentionNeeds,
    PagedContext,
    PagedRows,
    Span,
)
from looped_spec.runtime.attention.select import BACKENDS
from looped_spec.runtime.kv_cache import TRASH_BLOCK, KVPool, blocks_for

TOLERANCES = {
    # Sums of up to a few thousand products in another order: a few roundings of 2**-24, of values
    # up to about 4.
    torch.float32: 2e-5,
    # Values up to about 4, weights rounded to 8 bits before they meet them, the result rounded
    # once more: twice 4 * 2**-9.
    torch.bfloat16: 2**-6,
    # The same with 11 bits: twice 4 * 2**-12.
    torch.float16: 2**-9,
}


@dataclass(frozen=True)
class Shape:
    """The numbers of a case: B requests with T rows, up to `num_keys` positions each."""

    requests: int
    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    num_keys: int

    def __str__(self) -> str:
        heads = f"{self.heads}:{self.kv_heads}x{self.head_dim}"
        return f"B{self.requests}-T{self.rows}-{heads}-block{self.block_size}-{self.num_keys}"


class Case:
    """Requests of random lengths in random blocks; what no row may see is large, what must not be
    read is not a number."""

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        device: str = "cpu",
        seed: int = 0,
        *,
        start: int | None = None,
        knows_spans: bool = False,
        one_piece: bool = False,
    ) -> None:
        """`start` is the first position of the first request, else random; rows may then stand
        behind its last block. With `knows_spans` the host knows where requests stand, with
        `one_piece` each lies in blocks that follow each other."""
        dice = torch.Generator().manual_seed(seed)
        width = blocks_for(shape.num_keys, shape.block_size)
        num_blocks = shape.requests * width
        self.shape, self.dtype = shape, dtype
        self.pool = KVPool((), num_blocks + 1, shape.block_size, dtype, torch.device(device))
        room = width * shape.block_size
        latest = room - shape.rows
        starts = torch.randint(0, latest + 1, (shape.requests,), generator=dice)
        if start is not None:
            starts[0] = start
        positions = starts[:, None] + torch.arange(shape.rows)
        forbidden = num_blocks + 1  # beside the tables, not in them
        tables = torch.full((shape.requests, width + 2), forbidden)
        blocks = torch.randperm(num_blocks, generator=dice).view(-1, width) + 1
        if one_piece:
            blocks = torch.arange(1, num_blocks + 1).view(-1, width)
        capacities = []
        for table, own, last in zip(tables, blocks, positions[:, -1].tolist(), strict=True):
            used = min(blocks_for(last + 1, shape.block_size), width)
            table[:width] = TRASH_BLOCK
            table[:used] = own[:used]
            capacities.append(used * shape.block_size)
        size = (num_blocks + 2, shape.block_size, shape.kv_heads, shape.head_dim)
        pages = [torch.randn(size, generator=dice) for _ in range(2)]
        for page in pages:
            page[TRASH_BLOCK], page[forbidden] = 1e3, torch.nan
        q = torch.randn(shape.requests, shape.rows, shape.heads + 1, shape.head_dim, generator=dice)
        self.k_pages, self.v_pages = (page.to(device, dtype) for page in pages)
        self.pool.planes.append((self.k_pages, self.v_pages))
        self.q = q.to(device, dtype)[:, :, 1:]  # a slice of a merged projection
        self.positions = positions.to(device)
        limits = torch.full((shape.requests,), room)
        seeds = torch.zeros(shape.requests, dtype=torch.int64)
        spans = [
            Span(position, capacity, own if one_piece else None)
            for position, capacity, own in zip(
                starts.tolist(), capacities, blocks[:, 0].tolist(), strict=True
            )
        ]
        self.rows = PagedRows(
            tables.to(device)[:, :width],
            limits.to(device),
            seeds.to(device),
            spans if knows_spans else (),
        )
        self.inside = positions < room

    def attend(self, backend: AttentionBackend, scale: float | None = None) -> Tensor:
        """Attend all rows at once."""
        prepared = backend.prepare(self.positions, self.rows, self.pool)
        return backend.attend(self.q, self.k_pages, self.v_pages, prepared, scale)

    def context(self, backend: AttentionBackend) -> PagedContext:
        """A context of these rows; plane 0 holds the pages."""
        return PagedContext(self.pool, backend, self.rows, self.positions, 1)

    def answer(self, scale: float | None = None) -> Tensor:
        """Return [B, T, heads, head_dim] in fp64: one row at a time, softmax as written in books.
        Rows past their table are zero."""
        shape = self.shape
        scale = shape.head_dim**-0.5 if scale is None else scale
        q, k_pages, v_pages = (part.double() for part in (self.q, self.k_pages, self.v_pages))
        own = torch.arange(shape.heads, device=q.device) * shape.kv_heads // shape.heads
        out = torch.zeros_like(q)
        for request, row in self.inside.nonzero().tolist():
            seen = torch.arange(int(self.positions[request, row]) + 1, device=q.device)
            blocks = self.rows.block_tables[request, seen // shape.block_size]
            k, v = (pages[blocks, seen % shape.block_size][:, own] for pages in (k_pages, v_pages))
            scores = (q[request, row] * k).sum(-1) * scale  # [keys, heads]
            out[request, row] = (torch.softmax(scores, dim=0)[..., None] * v).sum(0)
        return out

    def check(self, out: Tensor, scale: float | None = None) -> None:
        """Compare with the answer, within what the dtype allows."""
        assert out.shape == self.q.shape and out.dtype == self.dtype
        error = (out.double() - self.answer(scale)).cpu()[self.inside].abs().max()
        assert float(error) <= TOLERANCES[self.dtype]


def needs(
    shape: Shape, dtype: torch.dtype, device: str = "cpu", num_splits: int = 0
) -> AttentionNeeds:
    """What a model of this shape asks of a backend."""
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    heads = frozenset({shape.head_dim})
    return AttentionNeeds(where, dtype, heads, shape.block_size, num_splits)


def backend_or_skip(name: str, asked: AttentionNeeds) -> AttentionBackend:
    """Return the backend, or skip the test with the reason why it cannot be used here."""
    reason = BACKENDS[name].unsupported_reason(asked)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    return BACKENDS[name].create(asked)
