"""A stage context over a small cache of one request, for tests that drive the stages themselves."""

from __future__ import annotations

import torch
from looped_spec_huginn.adapter import HuginnAdapter

from looped_spec.runtime.attention import PagedContext, PagedRows, SdpaBackend
from looped_spec.runtime.kv_cache import KVPool

BLOCK_SIZE = 4
NUM_BLOCKS = 12


def make_pool(adapter: HuginnAdapter, full_loops: int) -> KVPool:
    """Return a cache of 48 tokens."""
    planes = adapter.kv_planes(full_loops)
    return KVPool(planes, NUM_BLOCKS, BLOCK_SIZE, torch.float32, torch.device("cpu"))


def paged(
    pool: KVPool,
    start: int,
    stop: int,
    total_loops: int,
    kind: type[PagedContext] = PagedContext,
) -> PagedContext:
    """Return the context of positions `start` to `stop` of the only request."""
    rows = PagedRows(
        torch.arange(1, NUM_BLOCKS + 1)[None],
        torch.tensor([NUM_BLOCKS * BLOCK_SIZE]),
        torch.tensor([0]),
    )
    positions = torch.arange(start, stop)[None]
    return kind(pool, SdpaBackend(), rows, positions, total_loops)
