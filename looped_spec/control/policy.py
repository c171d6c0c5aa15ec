"""What a policy is to the controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from looped_spec.control.plan import Candidate, RoundFeedback


class Choice(NamedTuple):
    """What a policy wants to run next.

    Attributes:
        position: position in the bucket's candidates.
        probe: to learn something rather than because it is expected to be fastest.
        shadow_depths: depths to read out beside it.
        reason: why, in a few words.
    """

    position: int
    probe: bool
    shadow_depths: tuple[int, ...]
    reason: str


class Issued(NamedTuple):
    """A plan that was handed out, with what it was made for.

    Attributes:
        bucket: index of the bucket.
        position: position in the bucket's candidates.
        candidate: what runs.
        probe: whether it is a probe.
        batch_size: decoding requests.
        context_tokens: their context, as `AdaptiveController.plan` was told.
    """

    bucket: int
    position: int
    candidate: Candidate
    probe: bool
    batch_size: int
    context_tokens: float


@dataclass(frozen=True)
class CandidateScore:
    """How a policy sees one candidate.

    Attributes:
        candidate: the candidate.
        expected_tokens: tokens a request gets per round.
        cost_ms: time of a round, in ms (relative to nothing measured if there is no cost table).
        score: what the policy compares; larger is better.
    """

    candidate: Candidate
    expected_tokens: float
    cost_ms: float
    score: float


class CandidatePolicy(Protocol):
    """Chooses among a bucket's candidates. Owns all it has learnt; nothing else writes it."""

    def choose(
        self, bucket: int, batch_size: int, context_tokens: float, new_requests: int
    ) -> Choice:
        """Return what to run next in a bucket; called once a round."""
        ...

    def learn(self, issued: Issued, feedback: RoundFeedback) -> bool:
        """Take in the outcome of a plan; must not change what is current by itself.

        Returns whether the numbers make sense; of those that do not nothing is learnt.
        """
        ...

    def current(self, bucket: int) -> int:
        """Return the position that runs when nothing is probed."""
        ...

    def overruled(self, bucket: int, choice: Choice, position: int) -> None:
        """Hear that the round runs `position` instead of the choice just made."""
        ...

    def reason(self, bucket: int) -> str:
        """Return why the current candidate is current."""
        ...

    def scores(
        self, bucket: int, batch_size: int, context_tokens: float
    ) -> tuple[CandidateScore, ...]:
        """Return how each candidate of a bucket is seen now."""
        ...

    def notes(self) -> tuple[str, ...]:
        """Return what a user should know beside the scores."""
        ...

    def counters(self) -> dict[str, float]:
        """Return what the policy counts beside the controller, by name."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return all that was learnt as a JSON document."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        ...


def is_consistent(feedback: RoundFeedback, longest: int) -> bool:
    """Return whether every request accepted no more than it was proposed, and that no more than
    `longest`."""
    proposed, accepted = feedback.proposed, feedback.accepted
    if len(proposed) != len(accepted):
        return False
    return all(0 <= a <= p <= longest for p, a in zip(proposed, accepted, strict=True))
