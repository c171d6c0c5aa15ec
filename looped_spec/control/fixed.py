"""The policy that always runs each bucket's initial candidate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from looped_spec.control.config import AdaptiveSpecConfig
from looped_spec.control.plan import RoundFeedback
from looped_spec.control.policy import CandidateScore, Choice, Issued, is_consistent


class FixedPolicy:
    """Run the initial candidate of the bucket: the controller with its hands tied, for reference
    measurements."""

    def __init__(self, config: AdaptiveSpecConfig) -> None:
        self._buckets = config.buckets
        self._choices = tuple(Choice(b.initial, False, (), "pinned") for b in config.buckets)

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
