"""A load to simulate: phases of rounds with their acceptance and cost."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from looped_spec.control.plan import PLAIN, Candidate

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
        return self.numbers.best

    @cached_property
    def numbers(self) -> PhaseNumbers:
        """The phase as the simulator wants it, worked out once."""
        return PhaseNumbers(self)


class PhaseNumbers:
    """A phase's numbers in the form that the loop over rounds wants.

    Attributes:
        tokens: candidate -> expected tokens of the batch in a round.
        cost: candidate -> milliseconds of a round.
        best: the candidate with the highest rate.
        best_rate: its tokens per millisecond.
        plain_rate: those of plain decoding.
    """

    def __init__(self, phase: TracePhase) -> None:
        self.tokens = {c: phase.batch_size * phase.expected_tokens(c) for c in phase.cost_ms}
        self.cost = dict(phase.cost_ms)
        rates = {c: tokens / self.cost[c] for c, tokens in self.tokens.items()}
        self.best = max(rates, key=lambda c: rates[c])
        self.best_rate = rates[self.best]
        self.plain_rate = rates[PLAIN]
        # Negated, since bisect wants ascending numbers: bisect_left finds how many s_i are > u.
        self._negated = [
            {d: [-rate for rate in rates] for d, rates in survival.items()}
            for survival in phase.requests
        ]

    def rate(self, candidate: Candidate | None) -> float:
        """Return the tokens per millisecond of a candidate, of the best one for None."""
        if candidate is None:
            return self.best_rate
        return self.tokens[candidate] / self.cost[candidate]

    def accepted(self, candidate: Candidate, draws: Sequence[float]) -> tuple[int, ...]:
        """Return how many drafts each request keeps, by one u in [0, 1) per request."""
        k, d = candidate.num_speculative_tokens, candidate.draft_loops
        if k == 0:
            return (0,) * len(draws)
        if len(self._negated) == 1:
            rates = self._negated[0][d]
            return tuple([bisect_left(rates, -u, 0, k) for u in draws])
        kinds = [kind[d] for kind in self._negated]
        return tuple([bisect_left(kinds[i % len(kinds)], -u, 0, k) for i, u in enumerate(draws)])

    def right(
        self, depth: int, ran: Candidate, accepted: Sequence[int], draws: Sequence[float]
    ) -> tuple[int, ...]:
        """Return how many leading rows a shadow readout gets right, by one u per request.

        Depths are independent of each other. The readout of the depth that ran is right in the rows
        that were accepted and wrong in the one behind them, if there was a draft for it.
        """
        kinds = [kind[depth] for kind in self._negated]
        if depth != ran.draft_loops:
            return tuple([bisect_left(kinds[i % len(kinds)], -u) for i, u in enumerate(draws)])
        k, found = ran.num_speculative_tokens, []
        for i, (kept, u) in enumerate(zip(accepted, draws, strict=True)):
            rates = kinds[i % len(kinds)]
            is_next_right = kept == k < len(rates) and u * rates[k - 1] > rates[k]
            found.append(kept + is_next_right)
        return tuple(found)


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
