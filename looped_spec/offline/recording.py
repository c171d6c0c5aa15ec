"""A policy that runs one candidate and keeps what every round gave."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from looped_spec.control.plan import Candidate, RoundFeedback, SpeculationPlan


class RecordingPolicy:
    """Run the same candidate in every round, with the same shadow readouts.

    Attributes:
        feedback: of every round that was committed, in order.
    """

    def __init__(self, candidate: Candidate, shadow_depths: Sequence[int] = ()) -> None:
        self.candidate = candidate
        self.shadow_depths = tuple(shadow_depths)
        self.feedback: list[RoundFeedback] = []
        self._ids = itertools.count()

    def plan(
        self, batch_size: int, *, context_tokens: int = 0, new_requests: int = 0
    ) -> SpeculationPlan:
        """Return what to run, the same for any batch."""
        return SpeculationPlan(next(self._ids), self.candidate, shadow_depths=self.shadow_depths)

    def observe(self, feedback: RoundFeedback) -> None:
        """Keep a round's outcome."""
        self.feedback.append(feedback)
