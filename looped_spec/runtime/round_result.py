"""What the host gets of a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from looped_spec.runtime.sampler import NOT_FINITE
from looped_spec.runtime.token_logprobs import TokenLogprobs


@dataclass(frozen=True)
class RoundResult:
    """A round on the host, per request: the target's tokens (or `NOT_FINITE`), how many drafts
    were accepted, and the work done, in rows times loops.

    `shadow` holds for each of `shadow_depths` in how many leading rows a draft of that depth
    agrees with the target; those behind `accepted` tell nothing. `logprobs` has an entry for each
    of a request's tokens, or None for one that does not ask; empty where nobody does.
    """

    tokens: list[list[int]]
    accepted: list[int]
    loop_rows: list[int]
    shadow_depths: tuple[int, ...] = ()
    shadow: list[list[int]] = field(default_factory=list)
    logprobs: list[list[TokenLogprobs] | None] = field(default_factory=list)

    @property
    def is_finite(self) -> bool:
        """Whether every row had logits to choose from, those behind a rejected draft too."""
        return min(map(min, self.tokens)) != NOT_FINITE

    def part(self, places: Sequence[int]) -> RoundResult:
        """Return the result of some of the requests, by their places."""
        return RoundResult(
            [self.tokens[place] for place in places],
            [self.accepted[place] for place in places],
            [self.loop_rows[place] for place in places],
            self.shadow_depths,
            [self.shadow[place] for place in places] if self.shadow else [],
            [self.logprobs[place] for place in places] if self.logprobs else [],
        )
