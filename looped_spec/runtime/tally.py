"""What a round gave, counted as the policy is told of it."""

from __future__ import annotations

from collections.abc import Sequence

from looped_spec.control.plan import RoundFeedback, ShadowCounts, SpeculationPlan
from looped_spec.runtime.runner import RoundResult


class RoundTally:
    """Counts drafts request by request; those that could not have been committed do not count."""

    def __init__(self, result: RoundResult) -> None:
        self._result = result
        self._proposed: list[int] = []
        self._accepted: list[int] = []
        self._told: list[int] = []

    def add(
        self, accepted: int, num_drafts: int, room: int, due: int, taken: int
    ) -> tuple[int, int]:
        """Count the next request and return its proposed and accepted drafts.

        Args:
            accepted: its leading drafts that agree with the target and have memory.
            num_drafts: K of the round.
            room: its drafts that have memory.
            due: its tokens that could still come, less the last, which is no draft's due.
            taken: its tokens that were committed, fewer than accepted + 1 if one ended it.
        """
        proposed = min(num_drafts, room, due)
        # Rows whose context was committed can tell of other depths, the target's own too.
        told = min(accepted + 1, due)
        if taken <= accepted:
            # Drafts behind the end of a request are neither good nor bad.
            proposed, told = min(proposed, taken), min(told, taken)
        accepted = min(accepted, proposed)
        self._proposed.append(proposed)
        self._accepted.append(accepted)
        self._told.append(told)
        return proposed, accepted

    @property
    def is_finite(self) -> bool:
        """See `RoundResult.is_finite`."""
        return self._result.is_finite

    def feedback(
        self, plan: SpeculationPlan, seconds: float, num_speculative_tokens: int
    ) -> RoundFeedback:
        """Return what the policy is told of a round of `num_speculative_tokens` drafts that took
        `seconds`, without the prefill of other requests."""
        return RoundFeedback(
            plan.plan_id,
            tuple(self._proposed),
            tuple(self._accepted),
            seconds,
            num_speculative_tokens,
            shadow=tuple(
                ShadowCounts(depth, tuple(self._told), self._agreed(column))
                for column, depth in enumerate(self._result.shadow_depths)
            ),
        )

    def _agreed(self, column: int) -> tuple[int, ...]:
        matches: Sequence[list[int]] = self._result.shadow
        return tuple(min(row[column], told) for row, told in zip(matches, self._told, strict=True))
