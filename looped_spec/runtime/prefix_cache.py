"""Which full blocks of a prompt hold what: a chain of hashes over tokens, so that a block is found
only behind the very tokens that it was computed behind."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

_DIGEST_BYTES = 32  # nobody finds two prompts that share a hash, however long they try


@dataclass
class PrefixCacheStats:
    """Prompt tokens that were looked up, and those of them that were found: each request counts
    once, when it is first given memory."""

    num_queries: int = 0
    num_hits: int = 0


def hash_blocks(tokens: Sequence[int], block_size: int, seed: int | None) -> list[bytes]:
    """Return a hash for each full block of `tokens`, over it and all tokens before it.

    `seed` is that of the request where what the model computes depends on it, else None.
    """
    parent = b"" if seed is None else seed.to_bytes(8, "little", signed=True)
    hashes = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        block = array("q", tokens[start : start + block_size]).tobytes()
        parent = hashlib.blake2b(parent + block, digest_size=_DIGEST_BYTES).digest()
        hashes.append(parent)
    return hashes
