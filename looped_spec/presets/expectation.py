"""What speed-up a preset's numbers promise: expected tokens of a round over what it takes."""

from __future__ import annotations

from collections.abc import Sequence

from looped_spec.control.cost import CostTable
from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.presets.parts import AcceptanceEntry

CONTEXT_TOKENS = 512
"""Where candidates are compared, if nobody says."""


def expected_speedup(
    cost: CostTable,
    entry: AcceptanceEntry,
    batch_size: int,
    candidate: Candidate,
    context_tokens: float = CONTEXT_TOKENS,
) -> float | None:
    """Return E(K) T(0) / T(K, d) of a candidate of the entry's depth; None if the table lacks
    it."""
    plain = cost.ms(batch_size, context_tokens, PLAIN)
    ms = cost.ms(batch_size, context_tokens, candidate)
    if plain is None or ms is None:
        return None
    return entry.tokens(candidate.num_speculative_tokens) * plain / ms


def speedups(
    cost: CostTable,
    acceptance: Sequence[AcceptanceEntry],
    batch_size: int,
    context_tokens: float = CONTEXT_TOKENS,
) -> dict[Candidate, list[float]]:
    """Return the expected speed-up of every candidate of the table, once for each entry of its
    depth that was not kept to evaluate with."""
    found: dict[Candidate, list[float]] = {}
    for candidate in cost.candidates:
        for entry in acceptance:
            if entry.draft_loops == candidate.draft_loops and entry.group != "evaluation":
                value = expected_speedup(cost, entry, batch_size, candidate, context_tokens)
                if value is not None:
                    found.setdefault(candidate, []).append(value)
    return found
