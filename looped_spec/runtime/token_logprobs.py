"""What is known of one generated token beside its id."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities, natural, of the target's own distribution before temperature and filters.

    Attributes:
        token_id: the token that was generated.
        logprob: its log probability.
        rank: its place among all tokens by probability, from 1; equals share the first.
        top: the most likely tokens and theirs, the most likely first, as many as were asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]
