"""What a round gave, counted as the policy is told of it."""

from __future__ import annotations

from collections.abc import Sequence

from looped_spec.control.plan import RoundFeedback, ShadowCounts, SpeculationPlan
from looped_spec.errors import NotFiniteError
from looped_spec.runtime.request import Request
from looped_spec.runtime.round_result import RoundResult
from looped_spec.runtime.sampler import NOT_FINITE


class RoundTally:
    """Counts the drafts of each request; those that could not have been committed do not count.

    Attributes:
        proposed: drafts per request that could have been committed.
        accepted: those of them that were.
    """

    def __init__(self, result: RoundResult, num_drafts: int) -> None:
        """Count all drafts of a round of `num_drafts` each, until `cut` says otherwise."""
        self._result = result
        self._num_drafts = num_drafts
        self.proposed = [num_drafts] * len(result.accepted)
        self.accepted = list(result.accepted)
        # Rows whose context was committed can tell of other depths, the target's own too.
        self._told = [n + 1 for n in result.accepted] if result.shadow_depths else []

    def cut(self, place: int, room: int, due: int, taken: int) -> None:
        """Count the request at `place` again, of which not every draft could have been committed
        with a token behind it.

        Args:
            place: of the request in the batch.
            room: its drafts that have memory.
            due: its tokens that could still come, less the last, which is no draft's due.
            taken: its tokens that were committed.
        """
        accepted = min(self._result.accepted[place], room)
        proposed = min(self._num_drafts, room, due)
        told = min(accepted + 1, due)
        if taken <= accepted:
            # Drafts behind the end of a request are neither good nor bad.
            proposed, told = min(proposed, taken), min(told, taken)
        self.proposed[place] = proposed
        self.accepted[place] = min(accepted, proposed)
        if self._told:
            self._told[place] = told

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
            tuple(self.proposed),
            tuple(self.accepted),
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


def check_finite(requests: Sequence[Request], tokens: Sequence[int | None]) -> None:
    """Raise `NotFiniteError` that names the first request whose token is `NOT_FINITE`."""
    if NOT_FINITE in tokens:
        request = requests[tokens.index(NOT_FINITE)]
        raise NotFiniteError(
            f"the model computes NaN or infinity for request {request.request_id} after "
            f"{request.num_tokens} tokens: check its weights, or run it in float32"
        )
