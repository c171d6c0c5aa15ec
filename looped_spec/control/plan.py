"""What is run in one round, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from looped_spec.errors import ConfigError

MAX_SPECULATIVE_TOKENS = 64
"""Upper end of K: work grows with it, while the chance of the last draft falls to a K-th power."""


@dataclass(frozen=True)
class Candidate:
    """A choice of K and d: draft `num_speculative_tokens` tokens with `draft_loops` loops each.

    K = 0 is plain decoding; d is then 0.
    """

    num_speculative_tokens: int
    draft_loops: int

    def check(self, full_loops: int) -> Candidate:
        """Return self if a model run `full_loops` deep can do it; raise `ConfigError` with the
        range if not."""
        if not 0 <= self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"num_speculative_tokens must be between 0 and {MAX_SPECULATIVE_TOKENS}, "
                f"got {self.num_speculative_tokens}"
            )
        if self.num_speculative_tokens == 0:
            return Candidate(0, 0)
        if full_loops < 2:
            raise ConfigError(
                "speculation needs full_loops of at least 2: with 1 loop there is no cheaper draft"
            )
        if not 1 <= self.draft_loops < full_loops:
            raise ConfigError(
                f"draft_loops must be between 1 and full_loops - 1 = {full_loops - 1}, "
                f"got {self.draft_loops}"
            )
        return self


PLAIN = Candidate(0, 0)
"""No speculation."""


@dataclass(frozen=True)
class SpeculationPlan:
    """What one round runs, fixed before it starts; feedback carries its `plan_id`."""

    plan_id: int
    candidate: Candidate


@dataclass(frozen=True)
class RoundFeedback:
    """What one round gave, per request in the order of the batch.

    `proposed` counts only drafts that could have been committed: a request that ends behind the cut
    by a stop or its length limit does not count the drafts behind it, neither as accepted nor as
    failed.
    """

    plan_id: int
    proposed: tuple[int, ...]
    accepted: tuple[int, ...]
    seconds: float = field(compare=False)
