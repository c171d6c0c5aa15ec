"""The key/value cache: blocks of tokens, each holding every plane that the adapter declares."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from looped_spec.adapter import KVPlane

TRASH_BLOCK = 0
"""Block that padded rows and positions past a row's limit write to; it is never given to a
request."""


class BlockAllocator:
    """Hands out block ids. All or nothing: a request never holds a part of what it asked for."""

    def __init__(self, num_blocks: int, held: Collection[int] = ()) -> None:
        """Manage blocks 1..`num_blocks`, of which `held` are given out already; block 0 is the
        trash block on top of them."""
        self.num_blocks = num_blocks
        self._used = set(held)
        self._free = [block for block in range(num_blocks, 0, -1) if block not in self._used]

    @property
    def num_free(self) -> int:
        """How many blocks are free."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks, or None (and take nothing) if there are not that many."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        self._used.update(taken)
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back; each must have been allocated exactly once."""
        for block in blocks:
            self._used.remove(block)
            self._free.append(block)


class KVPool:
    """The tensors of the cache: for each plane, keys and values [num_blocks + 1, block_size,
    kv_heads, head_dim]."""

    def __init__(
        self,
        planes: Sequence[KVPlane],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.dtype = dtype
        self.planes: list[tuple[Tensor, Tensor]] = []
        for plane in planes:
            shape = (num_blocks + 1, block_size, plane.num_kv_heads, plane.head_dim)
            # Zeros, not empty: what is masked still meets a zero weight, and 0 * NaN would be NaN.
            pair = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
            self.planes.append((next(pair), next(pair)))

    def write(self, plane: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k and v ([B, T, kv_heads, head_dim]) of rows whose flat slots are `slots` ([B * T]
        int64)."""
        for pool, rows in zip(self.planes[plane], (k, v), strict=True):
            flat = pool.view(-1, pool.shape[2], pool.shape[3])
            flat.index_copy_(0, slots, rows.reshape(-1, pool.shape[2], pool.shape[3]))

    def copy(self, source: int, target: int, slots: Tensor) -> None:
        """Copy the keys and values at `slots` ([N] int64) of one plane to another of its shape."""
        for rows, pool in zip(self.planes[source], self.planes[target], strict=True):
            flat = rows.view(-1, rows.shape[2], rows.shape[3])
            pool.view(-1, pool.shape[2], pool.shape[3]).index_copy_(0, slots, flat[slots])

    def clean(self) -> None:
        """Put zeros for NaN and infinity."""
        for pair in self.planes:
            for pool in pair:
                pool.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def save(self, blocks: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Return the contents of `blocks` in every plane, on the host."""
        index = torch.tensor(blocks, dtype=torch.int64)
        return [(k[index.to(k.device)].cpu(), v[index.to(v.device)].cpu()) for k, v in self.planes]

    def restore(self, blocks: Sequence[int], saved: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Put back what `save` returned, into other blocks."""
        index = torch.tensor(blocks, dtype=torch.int64)
        for pair, contents in zip(self.planes, saved, strict=True):
            for pool, content in zip(pair, contents, strict=True):
                pool[index.to(pool.device)] = content.to(pool.device)


def bytes_per_block(planes: Sequence[KVPlane], block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes that one block takes over all planes, keys and values."""
    numbers = sum(2 * plane.num_kv_heads * plane.head_dim for plane in planes)
    return numbers * block_size * dtype.itemsize


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks `num_tokens` tokens need."""
    return -(-num_tokens // block_size)
