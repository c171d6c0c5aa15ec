"""Candidates for a model of which only the number of loops is known."""

from __future__ import annotations

from looped_spec.control.config import BatchBucket
from looped_spec.control.plan import PLAIN, Candidate

DRAFT_LENGTHS = (1, 2, 3, 4, 6, 8)
_MAX_K_BY_BATCH = ((8, 8), (16, 6), (32, 4), (128, 3))
"""(largest batch size, longest draft): a wide batch leaves no room for wasted rows (RFC)."""


def default_depths(full_loops: int) -> tuple[int, ...]:
    """Return draft depths worth trying: all of a shallow model, else D/16, D/8, D/4 and D/2."""
    if full_loops <= 4:
        return tuple(range(1, full_loops))
    return tuple(
        sorted({max(1, int(full_loops * part + 0.5)) for part in (1 / 16, 1 / 8, 1 / 4, 1 / 2)})
    )


def longest_draft(batch_size: int) -> int:
    """Return the longest draft worth trying at a batch size."""
    return next((k for size, k in _MAX_K_BY_BATCH if batch_size <= size), 2)


def default_buckets(full_loops: int, max_num_seqs: int, policy: str) -> tuple[BatchBucket, ...]:
    """Return buckets of doubling batch sizes up to `max_num_seqs`, plain decoding first in each.

    A ladder of `ema` has one depth, the one next to D/8: acceptance can only be compared along it.
    """
    depths = default_depths(full_loops)
    if policy != "goodput" and depths:
        depths = (min(depths, key=lambda d: (abs(d - full_loops / 8), d)),)
    buckets = []
    low, high = 1, 1
    while low <= max_num_seqs:
        longest = longest_draft(high)
        arms = [Candidate(k, d) for k in DRAFT_LENGTHS if k <= longest for d in depths]
        arms.sort(key=lambda c: (c.num_speculative_tokens * c.draft_loops, c.draft_loops))
        candidates = (PLAIN, *arms)
        buckets.append(BatchBucket(low, min(high, max_num_seqs), candidates, min(1, len(arms))))
        low, high = high + 1, high * 2
    return tuple(buckets)
