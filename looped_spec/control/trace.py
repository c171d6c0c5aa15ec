"""A load to simulate: phases of rounds with their acceptance and cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from looped_spec.control.plan import Candidate

Survival = Mapping[int, tuple[float, ...]]
"""Draft depth d -> s_1, s_2, ...; s_i = P(the first i drafts of depth d are all accepted)."""


@dataclass(frozen=True)
class CostError:
    """What is wrong with the cost table that the policy is given; what rounds take stays true.

    Attributes:
        cell_deviation: every cell is multiplied by exp(N(0, cell_deviation)), drawn per seed.
        depths: draft depth d -> factor for all cells of that depth.
        cells: candidate -> factor for its cell at every batch size.
    """

    cell_deviation: float = 0.0
    depths: Mapping[int, float] = field(default_factory=dict)
    cells: Mapping[Candidate, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TracePhase:
    """Rounds under one load.

    Attributes:
        rounds: how many.
        batch_size: decoding requests in each.
        context_tokens: their mean context length.
        requests: acceptance of request i is `requests[i % len(requests)]`.
        cost_ms: candidate -> milliseconds of a round.
        table_ms: what the policy's cost table says instead; the same if nothing is wrong with it.
        shadow_ms: milliseconds that one shadow depth adds to a round; None if there are none.
        mixed_prefill: share of rounds that also compute prompt tokens.
        prefill_ms: milliseconds that these add.
        cohort_change: all requests are new ones.
    """

    rounds: int
    batch_size: int
    context_tokens: int
    requests: tuple[Survival, ...]
    cost_ms: Mapping[Candidate, float]
    table_ms: Mapping[Candidate, float]
    shadow_ms: float | None = None
    mixed_prefill: float = 0.0
    prefill_ms: float = 0.0
    cohort_change: bool = False

    def expected_tokens(self, candidate: Candidate) -> float:
        """Return the mean number of tokens that a request gets in a round: 1 + s_1 + ... + s_K."""
        k, d = candidate.num_speculative_tokens, candidate.draft_loops
        if k == 0:
            return 1.0
        kinds = len(self.requests)
        total = 0.0
        for number, survival in enumerate(self.requests):
            share = (self.batch_size - number + kinds - 1) // kinds  # requests of this kind
            total += share * sum(survival[d][:k])
        return 1.0 + total / self.batch_size

    def rate(self, candidate: Candidate) -> float:
        """Return the expected tokens per millisecond of the whole batch."""
        return self.batch_size * self.expected_tokens(candidate) / self.cost_ms[candidate]

    def best(self) -> Candidate:
        """Return the candidate with the highest rate; the first of them on a tie."""
        return max(self.cost_ms, key=self.rate)


@dataclass(frozen=True)
class Trace:
    """A whole load, and what lies between the rounds and the policy.

    Attributes:
        full_loops: D.
        candidates: what a policy may choose, plain decoding among them.
        phases: one after the other.
        name: what to call it in a report.
        cost_noise: coefficient of variation of the measured time of a round (log-normal).
        cost_error: what is wrong with the policy's cost table.
        feedback_delay: how many further plans are made before a round's feedback arrives.
        feedback_duplicates: share of feedback that arrives a second time, one plan later.
        resume_ms: milliseconds that the first round costs in addition after one with K = 0.
    """

    full_loops: int
    candidates: tuple[Candidate, ...]
    phases: tuple[TracePhase, ...]
    name: str = "trace"
    cost_noise: float = 0.0
    cost_error: CostError = CostError()
    feedback_delay: int = 0
    feedback_duplicates: float = 0.0
    resume_ms: float = 0.0

    @property
    def rounds(self) -> int:
        """Rounds of all phases."""
        return sum(phase.rounds for phase in self.phases)
