"""Results, with the names that vLLM users know, and what speculation did for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass
class SpeculationMetrics:
    """Counts of speculative decoding, of one request or of many.

    Attributes:
        num_rounds: rounds of draft and verify, plain ones (K = 0) included.
        num_draft_tokens: drafts that could have been committed.
        num_accepted_tokens: drafts that were.
        num_loop_rows: rows times loops that the rounds computed, drafts and their checks included.
        proposed_by_position: index i counts rounds in which an (i + 1)-th draft could have been
            committed.
        accepted_by_position: index i counts rounds in which it was, and so all before it.
    """

    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_loop_rows: int = 0
    proposed_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted drafts by proposed drafts, 0..1; the bonus token does not count. None without
        drafts."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens a request commits per round: 1 + accepted drafts by rounds. None without rounds.

        A round that ends on a stop inside its accepted drafts has no token of the target's own and
        commits one less.
        """
        return 1 + self.num_accepted_tokens / self.num_rounds if self.num_rounds else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of proposed i-th drafts that were accepted, and so all before them."""
        pairs = zip(self.accepted_by_position, self.proposed_by_position, strict=True)
        return [accepted / proposed for accepted, proposed in pairs]

    @property
    def loops_per_round(self) -> float | None:
        """Loop passes that a request's round computed on average; with early exit, per token."""
        return self.num_loop_rows / self.num_rounds if self.num_rounds else None

    def add_round(self, proposed: int, accepted: int, loop_rows: int = 0) -> None:
        """Count one round of one request."""
        self.num_rounds += 1
        self.num_loop_rows += loop_rows
        self.num_draft_tokens += proposed
        self.num_accepted_tokens += accepted
        while len(self.proposed_by_position) < proposed:
            self.proposed_by_position.append(0)
            self.accepted_by_position.append(0)
        for position in range(proposed):
            self.proposed_by_position[position] += 1
            self.accepted_by_position[position] += position < accepted

    def add(self, other: SpeculationMetrics) -> None:
        """Add the counts of `other`."""
        self.num_rounds += other.num_rounds
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        self.num_loop_rows += other.num_loop_rows
        for mine, theirs in (
            (self.proposed_by_position, other.proposed_by_position),
            (self.accepted_by_position, other.accepted_by_position),
        ):
            mine.extend([0] * (len(theirs) - len(mine)))
            for position, count in enumerate(theirs):
                mine[position] += count


@dataclass
class RequestMetrics(SpeculationMetrics):
    """Speculation counts of one request, and how often it had to give its memory back."""

    num_preemptions: int = 0


@dataclass(frozen=True)
class CompletionOutput:
    """What was generated. `stop_reason` is the token id or string that ended it, None for the
    model's own end."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A request and what came of it; `outputs` has one entry."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics


@dataclass(frozen=True)
class StreamChunk:
    """New tokens of one request, in order; `text` may be empty while a character or a stop string
    is open."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
