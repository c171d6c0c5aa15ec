"""Invented loads: round times by formula, acceptance by depth.

A pass of one loop over n rows takes c(n) = sqrt(1 + (n / 96)^2), so that up to some tens of rows
are almost free and a wide batch pays for each; a round has 0.25 beside. With D = 4 this is the
RFC's T = d (K + 1) c(B) + (D - d) c(B (K + 1)) + T_other. A loop pass is taken as 1.2 ms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache

from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.control.trace import Survival, TracePhase

FULL_LOOPS = 4
LOOP_MS = 1.2
OTHER_LOOPS = 0.25
SHADOW_SHARE = 0.1
"""Time of reading out one more depth, over that of one loop pass."""

DECAY = 0.98
"""Conditional acceptance of a position over that of the one before."""

ARMS = (PLAIN, *(Candidate(k, d) for d in (1, 2, 3) for k in (1, 2, 3, 4, 6, 8)))
LONGEST = 8

Rates = tuple[float, float, float]
"""Acceptance of the first draft at d = 1, 2 and 3."""

# Landscape A: one loop drafts almost as well as two, so that d = 1 is best wherever drafts pay.
A: Mapping[str, Rates] = {
    "easy": (0.86, 0.90, 0.93),
    "middling": (0.66, 0.76, 0.82),
    "hard": (0.42, 0.55, 0.66),
    "hopeless": (0.06, 0.12, 0.20),
}
# Landscape B: one loop is a poor draft, two are a good one.
B: Mapping[str, Rates] = {
    "easy": (0.48, 0.93, 0.96),
    "middling": (0.30, 0.80, 0.88),
    "hard": (0.15, 0.58, 0.74),
    "hopeless": (0.03, 0.08, 0.16),
    "shallow": (0.80, 0.85, 0.88),
}


def survival(rates: Sequence[float], decay: float = DECAY, longest: int = LONGEST) -> Survival:
    """Return s_i of every depth from its first acceptance, falling by `decay` a position."""
    found = {}
    for d, first in enumerate(rates, start=1):
        reached, rate, chain = 1.0, first, []
        for _ in range(longest):
            reached *= rate
            chain.append(reached)
            rate *= decay
        found[d] = tuple(chain)
    return found


@cache
def round_ms(batch_size: int, candidate: Candidate, full_loops: int = FULL_LOOPS) -> float:
    """Return the time of a round of the formula above."""
    k, d = candidate.num_speculative_tokens, candidate.draft_loops
    narrow = math.sqrt(1 + (batch_size / 96) ** 2)
    wide = math.sqrt(1 + (batch_size * (k + 1) / 96) ** 2)
    loops = d * (k + 1) * narrow + (full_loops - d) * wide
    return LOOP_MS * (loops + OTHER_LOOPS)


def phase(
    batch_size: int,
    rates: Sequence[float],
    rounds: int = 400,
    *,
    context_tokens: int = 512,
    shadow_share: float | None = SHADOW_SHARE,
    cohort_change: bool = False,
    arms: Sequence[Candidate] = ARMS,
) -> TracePhase:
    """Return a phase of a landscape; `shadow_share` is a shadow readout's time in loop passes."""
    depths = {candidate.draft_loops for candidate in arms}
    cost = {candidate: round_ms(batch_size, candidate) for candidate in arms}
    return TracePhase(
        rounds=rounds,
        batch_size=batch_size,
        context_tokens=context_tokens,
        requests=({d: chain for d, chain in survival(rates).items() if d in depths},),
        cost_ms=cost,
        table_ms=cost,
        shadow_ms=None if shadow_share is None else shadow_share * LOOP_MS,
        cohort_change=cohort_change,
    )
