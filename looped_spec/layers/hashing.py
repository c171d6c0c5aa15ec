"""Random numbers as a function of (seed, position, counter).

A generator with a state would give a token other numbers in another batch, chunk or round. A hash
of the request's seed and the token's absolute position gives the same in prefill, draft and
verification.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def row_keys(seeds: Tensor, positions: Tensor, stream: int = 0) -> Tensor:
    """Return 32-bit keys in int64 for `seeds` and `positions` (int64, shapes that broadcast).

    Uses that share seeds and positions take different `stream` numbers (32 bits), so that what they
    draw is unrelated.
    """
    keys = mix(mix(mix(seeds & _MASK) ^ ((seeds >> 32) & _MASK)) ^ (positions & _MASK))
    return mix(keys ^ stream) if stream else keys


def random_bits(keys: Tensor, count: int) -> Tensor:
    """Return [..., count] int64: `count` numbers of 32 bits for each of `keys` (see `row_keys`)."""
    keys = keys[..., None]
    counter = torch.arange(count, device=keys.device).mul_(0x9E3779B1)
    bits = mix((counter + keys).bitwise_and_(_MASK))
    return mix(bits.bitwise_xor_(mix(keys ^ 0x5BD1E995)))


def open_uniform(bits: Tensor) -> Tensor:
    """Map 32-bit numbers to fp32 strictly between 0 and 1: fine near 0, at most 1 - 2**-24."""
    return bits.float().add_(0.5).mul_(2.0**-32).clamp_(max=1.0 - 2.0**-24)


def mix(x: Tensor) -> Tensor:
    """Mix 32 bits held in int64: two rounds of multiply and xorshift.

    The constants are those of the hash-prospector search; both factors are below 2**31, so no
    product leaves the signed 64-bit range. The argument stays; for the numbers of a vocabulary
    there are never more than two others of its size.
    """
    x = (x >> 16).bitwise_xor_(x).mul_(0x21F0AAAD).bitwise_and_(_MASK)
    x = (x >> 15).bitwise_xor_(x).mul_(0x735A2D97).bitwise_and_(_MASK)
    return (x >> 15).bitwise_xor_(x)
