"""The policy that never changes its mind."""

from __future__ import annotations

import itertools

from looped_spec.control.plan import Candidate, RoundFeedback, SpeculationPlan


class StaticPolicy:
    """Run the same candidate in every round."""

    def __init__(self, candidate: Candidate) -> None:
        self.candidate = candidate
        self._ids = itertools.count()

    def plan(
        self, batch_size: int, *, context_tokens: int = 0, new_requests: int = 0
    ) -> SpeculationPlan:
        """Return what to run with `batch_size` decoding requests, the same for any."""
        return SpeculationPlan(next(self._ids), self.candidate)

    def observe(self, feedback: RoundFeedback) -> None:
        """Take note of a round's outcome; nothing depends on it here."""
