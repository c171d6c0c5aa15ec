"""What is run in one round, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

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


class SpeculationPlan(NamedTuple):
    """What one round runs, fixed before it starts; feedback carries its `plan_id`.

    A named tuple rather than a frozen dataclass because one is made every round, and takes a fifth
    of the time to make.

    Attributes:
        plan_id: identity of the plan; ids rise by one.
        candidate: K and d of the round.
        bucket: index of the batch bucket that the choice was made for.
        probe: the round is run to learn something, not because it is expected to be fastest.
        shadow_depths: draft depths, ascending, whose readout the engine should compare with the
            target's tokens on this round's verified rows; it may leave them out.
    """

    plan_id: int
    candidate: Candidate
    bucket: int = 0
    probe: bool = False
    shadow_depths: tuple[int, ...] = ()


@dataclass(frozen=True)
class ShadowCounts:
    """What drafts of another depth would have given in the same round, per request.

    `accepted` counts leading rows where the readout after `draft_loops` loops chose the target's
    token; `proposed` counts the rows that could tell: those whose context was committed, which are
    the accepted drafts' and the one behind them, and none behind a limit or stop. So K = 0 tells of
    a first draft at every depth, and K accepted drafts of a (K + 1)-th.
    """

    draft_loops: int
    proposed: tuple[int, ...]
    accepted: tuple[int, ...]


@dataclass(frozen=True)
class RoundFeedback:
    """What one round gave, per request in the order of the batch.

    `proposed` counts only drafts that could have been committed: a request that ends behind the cut
    by a stop or its length limit does not count the drafts behind it, neither as accepted nor as
    failed.

    Attributes:
        plan_id: the plan that ran.
        proposed: drafts per request that could have been committed.
        accepted: drafts per request that were, `accepted[i] <= proposed[i]`.
        seconds: time of the round, without prefill of other requests where the engine can tell.
        num_speculative_tokens: K that really ran; None means the plan's.
        num_prefill_tokens: prompt tokens computed inside `seconds`; such rounds teach no cost.
        shadow: one entry per shadow depth that was computed.
    """

    plan_id: int
    proposed: tuple[int, ...]
    accepted: tuple[int, ...]
    seconds: float = field(compare=False)
    num_speculative_tokens: int | None = None
    num_prefill_tokens: int = 0
    shadow: tuple[ShadowCounts, ...] = ()
