"""Results, with the names that vLLM users know, and what speculation did for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from looped_spec.control.plan import Candidate
from looped_spec.runtime.token_logprobs import TokenLogprobs

FinishReason = Literal["stop", "length", "abort"]

Outcome = tuple[int, int, int, int]
"""What a round of one request was: K, d, proposed drafts, accepted drafts."""


@dataclass
class SpeculationMetrics:
    """Counts of speculative decoding, of one request or of many.

    A round counts once for every request in it. All that is said of drafts follows from how often
    each outcome occurred, which is one count a round however many drafts it has.

    Attributes:
        num_rounds: rounds of draft and verify, plain ones (K = 0) included.
        num_loop_rows: rows times loops that the rounds computed, drafts and their checks included.
        num_probe_rounds: rounds run to learn something, not because they were expected to be
            fastest.
        num_switches: rounds that ran another (K, d) than the one before.
        outcomes: how often each outcome occurred. Proposed are drafts that could have been
            committed.
    """

    num_rounds: int = 0
    num_loop_rows: int = 0
    num_probe_rounds: int = 0
    num_switches: int = 0
    outcomes: dict[Outcome, int] = field(default_factory=dict)
    _newest: Candidate | None = field(default=None, repr=False, compare=False)

    @property
    def num_draft_tokens(self) -> int:
        """Drafts that could have been committed."""
        return sum(proposed * count for proposed, _, count in self._by_counts())

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts that were committed."""
        return sum(accepted * count for _, accepted, count in self._by_counts())

    @property
    def proposed_by_position(self) -> list[int]:
        """Index i counts rounds in which an (i + 1)-th draft could have been committed."""
        return self._at_least((proposed, count) for proposed, _, count in self._by_counts())

    @property
    def accepted_by_position(self) -> list[int]:
        """Index i counts rounds in which it was, and so all before it."""
        return self._at_least((accepted, count) for _, accepted, count in self._by_counts())

    @property
    def rounds_by_candidate(self) -> dict[Candidate, int]:
        """How many rounds each (K, d) had, the most frequent first."""
        rounds: dict[Candidate, int] = {}
        for (k, d, _, _), count in self.outcomes.items():
            rounds[Candidate(k, d)] = rounds.get(Candidate(k, d), 0) + count
        return dict(sorted(rounds.items(), key=lambda item: -item[1]))

    @property
    def acceptance_histogram(self) -> list[int]:
        """Index i counts rounds in which exactly i drafts were accepted."""
        counts = [0] * (1 + max((accepted for _, accepted, _ in self._by_counts()), default=-1))
        for _, accepted, count in self._by_counts():
            counts[accepted] += count
        return counts

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

    def add_round(
        self,
        candidate: Candidate,
        proposed: int,
        accepted: int,
        loop_rows: int = 0,
        probe: bool = False,
    ) -> None:
        """Count one round of one request."""
        self.num_rounds += 1
        self.num_loop_rows += loop_rows
        self.num_probe_rounds += probe
        if candidate is not self._newest:
            self._note_candidate(candidate)
        outcome = candidate.num_speculative_tokens, candidate.draft_loops, proposed, accepted
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def add_rounds(
        self,
        candidate: Candidate,
        proposed: Sequence[int],
        accepted: Sequence[int],
        loop_rows: int,
        probe: bool,
    ) -> None:
        """Count one round of many requests; `loop_rows` is that of all together."""
        if not proposed:
            return
        self.num_rounds += len(proposed)
        self.num_loop_rows += loop_rows
        self.num_probe_rounds += probe * len(proposed)
        self._note_candidate(candidate)
        k, d = candidate.num_speculative_tokens, candidate.draft_loops
        for (drafts, agreed), count in Counter(zip(proposed, accepted, strict=True)).items():
            outcome = k, d, drafts, agreed
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + count

    def add(self, other: SpeculationMetrics) -> None:
        """Add the counts of `other`."""
        self.num_rounds += other.num_rounds
        self.num_loop_rows += other.num_loop_rows
        self.num_probe_rounds += other.num_probe_rounds
        self.num_switches += other.num_switches
        for outcome, count in other.outcomes.items():
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + count

    def _note_candidate(self, candidate: Candidate) -> None:
        self.num_switches += self._newest is not None and candidate != self._newest
        self._newest = candidate

    def _by_counts(self) -> Iterator[tuple[int, int, int]]:
        for (_, _, proposed, accepted), count in self.outcomes.items():
            yield proposed, accepted, count

    def _at_least(self, values: Iterable[tuple[int, int]]) -> list[int]:
        """Return in place i how many rounds have a value above i, for all drafts proposed."""
        length = max((proposed for proposed, _, _ in self._by_counts()), default=0)
        counts = [0] * length
        for value, count in values:
            for position in range(value):
                counts[position] += count
        return counts


@dataclass
class RequestMetrics(SpeculationMetrics):
    """Speculation counts of one request, and how often it had to give its memory back."""

    num_preemptions: int = 0


@dataclass(frozen=True)
class CompletionOutput:
    """What was generated. `stop_reason` is the token id or string that ended it, None for the
    model's own end. `logprobs` has an entry for each of `token_ids`, if they were asked for."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """The log probability of all of it together, None without `logprobs`."""
        return sum(one.logprob for one in self.logprobs) if self.logprobs is not None else None


@dataclass(frozen=True)
class RequestOutput:
    """A request and what came of it; `outputs` has one entry.

    `num_cached_tokens` tokens of the prompt were computed by earlier requests already.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class StreamChunk:
    """New tokens of one request, in order; `text` may be empty while a character or a stop string
    is open."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
