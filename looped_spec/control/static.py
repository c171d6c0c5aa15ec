"""The policy that never changes its mind."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from looped_spec.control.config import MAX_BATCH_SIZE, AdaptiveSpecConfig, BatchBucket
from looped_spec.control.plan import Candidate, RoundFeedback, SpeculationPlan
from looped_spec.control.policy import CandidateScore, Choice, Issued, is_consistent


class StaticPolicy:
    """Run the initial candidate of the bucket in every round, whatever comes of it.

    An engine takes it as it is, for one (K, d) at any batch size; under a controller, which finds
    the bucket and counts, it is the policy `static` of a configuration.

    Args:
        chosen: what to run at any batch size, or the buckets that say it for each.
    """

    def __init__(self, chosen: Candidate | Sequence[BatchBucket]) -> None:
        if isinstance(chosen, Candidate):
            chosen = (BatchBucket(1, MAX_BATCH_SIZE, (chosen,)),)
        self._buckets = tuple(chosen)
        self._choices = tuple(Choice(b.initial, False, (), "pinned") for b in self._buckets)
        self._ids = itertools.count()
        self.candidate = self._buckets[0].candidates[self._buckets[0].initial]
        """What a lone request runs."""

    @classmethod
    def of(cls, config: AdaptiveSpecConfig) -> StaticPolicy:
        """Return the policy that runs the initial candidates of a configuration."""
        return cls(config.buckets)

    def plan(
        self, batch_size: int, *, context_tokens: int = 0, new_requests: int = 0
    ) -> SpeculationPlan:
        """Return what to run with `batch_size` decoding requests, without a controller."""
        for bucket in self._buckets:
            if batch_size <= bucket.max_batch_size:
                break
        return SpeculationPlan(next(self._ids), bucket.candidates[bucket.initial])

    def observe(self, feedback: RoundFeedback) -> None:
        """Take note of a round's outcome; nothing depends on it here."""

    def choose(
        self, bucket: int, batch_size: int, context_tokens: float, new_requests: int
    ) -> Choice:
        """Return the initial candidate."""
        return self._choices[bucket]

    def learn(self, issued: Issued, feedback: RoundFeedback) -> bool:
        """Only check the numbers: nothing depends on them."""
        return is_consistent(feedback, issued.candidate.num_speculative_tokens)

    def current(self, bucket: int) -> int:
        """Return the position of the initial candidate."""
        return self._buckets[bucket].initial

    def overruled(self, bucket: int, choice: Choice, position: int) -> None:
        """Do nothing: the next vote is the same."""

    def reason(self, bucket: int) -> str:
        """Say that it is pinned."""
        return "pinned"

    def scores(
        self, bucket: int, batch_size: int, context_tokens: float
    ) -> tuple[CandidateScore, ...]:
        """Return nothing: no candidate is compared."""
        return ()

    def notes(self) -> tuple[str, ...]:
        """Return nothing."""
        return ()

    def counters(self) -> dict[str, float]:
        """Return nothing."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take any state: there is none."""
