"""Which rounds are captured: the shapes that a configuration can reach, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from looped_spec.control.config import AdaptiveSpecConfig
from looped_spec.control.controller import FAR_BEYOND
from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.runtime.round_program import RoundShape
from looped_spec.runtime.sampler import SamplingMode

CAPTURED_MODES = (SamplingMode.FILTERED, SamplingMode.GREEDY)
"""A batch that is sampled without filters runs the round with filters, which leaves it all."""


def padded_sizes(max_num_seqs: int, given: Iterable[int] = ()) -> tuple[int, ...]:
    """Return the batch sizes that are padded to, ascending: `given` as far as they can be met,
    else 1, 2, 4, 8, then steps of 8, and `max_num_seqs` itself."""
    wanted = tuple(given)
    if wanted:
        sizes = {min(size, max_num_seqs) for size in wanted}
    else:
        sizes = {s for s in (1, 2, 4, *range(8, max_num_seqs, 8)) if s < max_num_seqs}
        sizes.add(max_num_seqs)
    return tuple(sorted(sizes))


def pad(batch_size: int, sizes: Sequence[int]) -> int | None:
    """Return the least of `sizes` (ascending) that holds the batch, None if none does."""
    return next((size for size in sizes if size >= batch_size), None)


def reachable_shapes(
    config: AdaptiveSpecConfig,
    sizes: Sequence[int],
    modes: Sequence[SamplingMode] = CAPTURED_MODES,
) -> list[RoundShape]:
    """Return every shape that a round under `config` can have, largest first.

    A bucket serves batches a little below its edge too, and near the end of all requests of a
    batch the engine takes a shorter draft of the same depth, from any bucket, or none.
    """
    pairs: set[tuple[int, Candidate]] = set()
    for bucket in config.buckets:
        low = max(1, bucket.min_batch_size - FAR_BEYOND + 1)
        batches = range(low, bucket.max_batch_size + 1)
        reached = {size for batch in batches if (size := pad(batch, sizes)) is not None}
        candidates = {PLAIN, *bucket.candidates}
        for candidate in bucket.candidates:
            candidates.update(c for c in config.candidates if _is_shorter(c, candidate))
        pairs.update((size, candidate) for size in reached for candidate in candidates)
    shapes = {RoundShape.of(size, candidate, mode) for size, candidate in pairs for mode in modes}
    return largest_first(shapes)


def largest_first(shapes: Iterable[RoundShape]) -> list[RoundShape]:
    """Order shapes by the memory that they need, which is most for the widest verification."""

    def size(shape: RoundShape) -> tuple[int, ...]:
        return (
            shape.num_rows,
            shape.batch_size,
            shape.num_speculative_tokens,
            shape.draft_loops,
            shape.mode.value,
        )

    return sorted(shapes, key=size, reverse=True)


def _is_shorter(one: Candidate, other: Candidate) -> bool:
    return (
        one.draft_loops == other.draft_loops
        and 0 < one.num_speculative_tokens < other.num_speculative_tokens
    )
