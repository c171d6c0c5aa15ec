"""Why the controller runs what it runs, as data and as lines to read."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from looped_spec.control.plan import Candidate
from looped_spec.control.policy import CandidateScore


@dataclass(frozen=True)
class BucketExplanation:
    """One batch bucket: its candidates as the policy sees them, and which is current and why.

    `batch_size` and `context_tokens` are what the scores were computed for: those of the bucket's
    last round, or its largest batch if there was none.
    """

    min_batch_size: int
    max_batch_size: int
    batch_size: int
    context_tokens: float
    is_active: bool
    current: Candidate
    reason: str
    scores: tuple[CandidateScore, ...]

    def lines(self) -> list[str]:
        """Return one line for the bucket and one for each candidate that was scored."""
        mark = " (active)" if self.is_active else ""
        head = (
            f"batch {self.min_batch_size}-{self.max_batch_size}{mark}: K={_k(self.current)} "
            f"d={self.current.draft_loops}, {self.reason}"
        )
        return [head, *(self._line(score) for score in self.scores)]

    def _line(self, score: CandidateScore) -> str:
        mark = "*" if score.candidate == self.current else " "
        return (
            f"  {mark} K={_k(score.candidate)} d={score.candidate.draft_loops}: "
            f"{score.expected_tokens:.2f} tokens in {score.cost_ms:.3f} ms, score {score.score:.4f}"
        )


@dataclass(frozen=True)
class Explanation:
    """What `AdaptiveController.explain` returns; `str()` is for people, `as_dict()` for JSON."""

    policy: str
    buckets: tuple[BucketExplanation, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"policy {self.policy}"]
        for bucket in self.buckets:
            lines += bucket.lines()
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    @property
    def line(self) -> str:
        """The active bucket in one line."""
        active = next((b for b in self.buckets if b.is_active), self.buckets[0])
        return f"policy {self.policy}, {active.lines()[0]}"

    def as_dict(self) -> dict[str, Any]:
        """Return the same as plain dictionaries, lists, strings and numbers."""
        document = asdict(self)
        document["buckets"] = [
            {**bucket, "scores": list(bucket["scores"])} for bucket in document["buckets"]
        ]
        document["notes"] = list(self.notes)
        return document


def _k(candidate: Candidate) -> int:
    return candidate.num_speculative_tokens
