"""The key/value cache: blocks of tokens, each holding every plane that the adapter declares."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from looped_spec.adapter import KVPlane
from looped_spec.huge_pages import take_soon, zeros

TRASH_BLOCK = 0
"""Block that padded rows and positions past a row's limit write to; it is never given to a
request."""


class BlockAllocator:
    """Hands out block ids. All or nothing: a request never holds a part of what it asked for.

    A block that was published under a hash keeps its contents when it is free, and can be taken
    again by that hash, by several requests at once; they must not write it. Such blocks are given
    out anew when no others are left, those first that were free for longest.
    """

    def __init__(self, num_blocks: int, held: Iterable[int] = ()) -> None:
        """Manage blocks 1..`num_blocks`, of which `held` are given out already, once for each time
        that they occur; block 0 is the trash block on top of them."""
        self.num_blocks = num_blocks
        self._holders = dict(Counter(held))
        # In the order in which they are taken, from the end.
        blocks = range(num_blocks, 0, -1)
        self._free = dict.fromkeys([block for block in blocks if block not in self._holders])
        self._idle: OrderedDict[int, None] = OrderedDict()  # free, with contents; oldest first
        self._by_hash: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """How many blocks are held by nobody."""
        return len(self._free) + len(self._idle)

    @property
    def num_published(self) -> int:
        """How many blocks can be found by a hash."""
        return len(self._hashes)

    def allocate(self, count: int, near: int = 0) -> list[int] | None:
        """Take `count` blocks to write to, or None (and take nothing) if there are not that many.

        Those from `near` on are taken if they are free, so that a text lies in one piece where it
        can.
        """
        if count > self.num_free:
            return None
        free = self._free
        taken: list[int] = []
        for _ in range(count):
            block = near
            if near in free:
                del free[near]
            else:
                block = free.popitem()[0] if free else self._evict()
            taken.append(block)
            near = block + 1
        self._holders.update(dict.fromkeys(taken, 1))
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks of a request back, in the order of its tokens."""
        for block in reversed(blocks):  # what comes later in a text is of use to fewer
            holders = self._holders[block] - 1
            if holders:
                self._holders[block] = holders
                continue
            del self._holders[block]
            if block in self._hashes:
                self._idle[block] = None
            else:
                self._free[block] = None

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks published under `hashes`, up to the first that is not."""
        found = []
        for one in hashes:
            block = self._by_hash.get(one)
            if block is None:
                break
            found.append(block)
        return found

    def claim(
        self, shared: Sequence[int], count: int, spare: int = 0, near: int = 0
    ) -> list[int] | None:
        """Take published blocks, whoever else holds them, and `count` others to write to;
        None (and take nothing) unless that leaves `spare` free.

        The others follow the last published block if they are free, or are from `near` on where
        none is published.
        """
        if not shared:
            return self.allocate(count, near) if count + spare <= self.num_free else None
        idle = sum(block in self._idle for block in shared)
        if count + spare > self.num_free - idle:
            return None
        for block in shared:  # first, so that none of them is given out anew
            self._idle.pop(block, None)
            self._holders[block] = self._holders.get(block, 0) + 1
        others = None
        try:
            others = self.allocate(count, shared[-1] + 1)
        finally:
            if others is None:
                self.free(shared)
        return None if others is None else [*shared, *others]

    def publish(self, block: int, block_hash: bytes) -> None:
        """Let a held block that is written for good be found; the first under a hash stays."""
        if self._by_hash.setdefault(block_hash, block) == block:
            self._hashes[block] = block_hash

    def forget(self) -> None:
        """Let no block be found any more."""
        self._free.update(self._idle)
        self._idle.clear()
        self._by_hash.clear()
        self._hashes.clear()

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._by_hash[self._hashes.pop(block)]
        return block


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
            self.planes.append((zeros(shape, dtype, device), zeros(shape, dtype, device)))
        take_soon([pool for pair in self.planes for pool in pair])

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
