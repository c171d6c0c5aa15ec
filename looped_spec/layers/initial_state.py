"""The random state that the recurrence starts from, as a function of (request seed, position)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from looped_spec.layers.hashing import open_uniform, random_bits, row_keys

BOUND = 3.0
"""The normal distribution is cut at so many standard deviations."""

_STREAM = 0x48D61C57
_INSIDE = math.erf(BOUND / math.sqrt(2.0))


def truncated_normal(seeds: Tensor, positions: Tensor, channels: int) -> Tensor:
    """Return standard normal numbers cut at +-3, fp32 [B, T, channels], independent of each other.

    `seeds` is [B] int64, `positions` is [B, T] int64; both and the channel alone decide a number,
    so that a token starts from the same state in prefill, draft and verification, whatever is
    computed beside it.
    """
    keys = row_keys(seeds[:, None], positions, _STREAM)
    uniform = open_uniform(random_bits(keys, channels))
    # Inverse of the distribution function, restricted to the share of mass that lies inside.
    normal = torch.erfinv((2.0 * uniform - 1.0) * _INSIDE) * math.sqrt(2.0)
    return normal.clamp(-BOUND, BOUND)
