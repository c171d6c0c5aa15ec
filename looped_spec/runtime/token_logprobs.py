"""What is known of one generated token beside its id."""

from __future__ import annotations

from array import array
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities, natural, of the target's own distribution before temperature and filters.

    A server holds very many of these until their answers end, so the likely tokens are packed.

    Attributes:
        token_id: the token that was generated.
        logprob: its log probability.
        rank: its place among all tokens by probability, from 1; equals share the first.
        top_ids: the most likely tokens, the most likely first, as many as were asked for.
        top_logprobs: theirs.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: array[int]
    top_logprobs: array[float]

    @property
    def top(self) -> list[tuple[int, float]]:
        """The most likely tokens with theirs, the most likely first."""
        return list(zip(self.top_ids, self.top_logprobs, strict=True))
