"""Acceptance thresholds that a cost table implies."""

from __future__ import annotations

import math
from collections.abc import Callable

from looped_spec.control.plan import Candidate

NEVER = 1.0
ALWAYS = 0.0


def expected_tokens(conditional: float, num_speculative_tokens: int) -> float:
    """Return E(K) = 1 + p + ... + p^K: tokens a request gets per round if each draft is accepted
    with probability p, given that those before it were."""
    total, survival = 1.0, 1.0
    for _ in range(num_speculative_tokens):
        survival *= conditional
        total += survival
    return total


def draft_acceptance_rate(conditional: float, num_speculative_tokens: int) -> float:
    """Return alpha = (E(K) - 1) / K."""
    return (expected_tokens(conditional, num_speculative_tokens) - 1) / num_speculative_tokens


def break_even(
    low: Candidate, high: Candidate, cost: Callable[[Candidate], float], offset: float = 0.0
) -> float:
    """Return the conditional acceptance above which `high` gives more tokens per second.

    `offset` is by how much the log-odds of acceptance of `high` exceed those of `low`; the returned
    acceptance is that of `low`, or of `high` if `low` does not draft. The general rule is
    E_high / T_high > E_low / T_low (control.md section 2); the gain of a longer or deeper draft
    rises with the acceptance, so there is one crossing, found by halving.
    """
    ratio = cost(high) / cost(low)
    drafts = low.num_speculative_tokens > 0

    def gain(p: float) -> float:
        q = shifted(p, offset) if drafts else p
        return expected_tokens(q, high.num_speculative_tokens) - ratio * expected_tokens(
            p, low.num_speculative_tokens
        )

    if gain(1.0) <= 0:
        return NEVER
    if gain(0.0) > 0:
        return ALWAYS
    below, above = 0.0, 1.0
    for _ in range(60):
        middle = (below + above) / 2
        if gain(middle) > 0:
            above = middle
        else:
            below = middle
    return above


def shifted(probability: float, logits: float) -> float:
    """Return a probability whose log-odds are moved by `logits`."""
    if probability <= 0 or probability >= 1 or not logits:
        return probability
    odds = probability / (1 - probability) * math.exp(logits)
    return odds / (1 + odds)
