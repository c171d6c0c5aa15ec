"""Whether a text repeats itself: such text is easy to draft, and tells nothing of other texts."""

from __future__ import annotations

from collections.abc import Sequence

NGRAM_TOKENS = 8
"""A token counts as repeated if it ends a run of so many tokens that stood there before."""

ECHO_SHARE = 0.5
"""Share of repeated tokens from which on a text is an echo."""


def repeated_share(token_ids: Sequence[int], start: int = 0) -> float:
    """Return the share of the tokens from `start` on that end a run of `NGRAM_TOKENS` tokens which
    stands earlier in `token_ids` too; 0.0 where there are none."""
    seen: set[tuple[int, ...]] = set()
    repeated = 0
    for stop in range(1, len(token_ids) + 1):
        run = tuple(token_ids[max(0, stop - NGRAM_TOKENS) : stop])
        if len(run) == NGRAM_TOKENS:
            if stop > start and run in seen:
                repeated += 1
            seen.add(run)
    return repeated / max(len(token_ids) - start, 1)


def is_echo(token_ids: Sequence[int], start: int = 0) -> bool:
    """Tell whether at least `ECHO_SHARE` of the tokens from `start` on repeat what was there."""
    return repeated_share(token_ids, start) >= ECHO_SHARE
