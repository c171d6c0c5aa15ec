"""How long cells will take: a guess before anything was measured, then what such cells took."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.offline.cells import AcceptanceRun, Cell, CostBlock
from looped_spec.offline.measure_cost import ENGINE_STEPS, ROUNDS, VISITS, shadowed
from looped_spec.offline.plan import CHUNK_PROMPTS, SamplingPlan
from looped_spec.offline.recording import RecordingPolicy
from looped_spec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from looped_spec.runtime.llm import LLM

_TOKENS_PER_ROUND = 2.0
_NEWEST = 5


@dataclass
class CellTimes:
    """Seconds per cell.

    Attributes:
        plan: whose cells they are.
        round_seconds: {batch size: seconds of a plain round}.
        token_seconds: seconds of a prompt token.
    """

    plan: SamplingPlan
    round_seconds: dict[int, float]
    token_seconds: float
    _factors: dict[Hashable, deque[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, llm: LLM, plan: SamplingPlan) -> CellTimes:
        """Time a few plain rounds of the smallest and the largest batch."""
        sizes = sorted({plan.settings.batch_sizes[0], plan.settings.batch_sizes[-1]})
        rounds, token_seconds = {}, 0.0
        for size in sizes:
            policy = RecordingPolicy(PLAIN)
            llm.policy = policy
            params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
            start = time.monotonic()
            llm.generate([[1] * 16] * size, [params] * size, use_tqdm=False)
            seconds = [feedback.seconds for feedback in policy.feedback]
            rounds[size] = min(seconds)
            token_seconds = max(time.monotonic() - start - sum(seconds), 0.0) / (16 * size)
        return cls(plan, rounds, token_seconds)

    def seconds(self, cell: Cell) -> float:
        """Return how long a cell is expected to take."""
        for name in self._names(cell):
            if name in self._factors:
                return statistics.median(self._factors[name]) * self._guess(cell)
        return self._guess(cell)

    def total(self, cells: Iterable[Cell]) -> float:
        """Return how long several cells are expected to take, one after the other."""
        return sum(self.seconds(cell) for cell in cells)

    def learn(self, cell: Cell, seconds: float) -> None:
        """Take note of how long a cell took; a clock that went backwards counts as no time.

        The median of the newest few counts: one cell in which the machine stood still does not make
        all that follow seem too long for the budget.
        """
        factor = max(seconds, 0.0) / max(self._guess(cell), 1e-9)
        for name in self._names(cell):
            self._factors.setdefault(name, deque(maxlen=_NEWEST)).append(factor)

    def _names(self, cell: Cell) -> tuple[Hashable, ...]:
        """Return what a cell's time is learnt under, the closest first."""
        return (self._group(cell), type(cell).__name__, "")

    def _group(self, cell: Cell) -> Hashable:
        if isinstance(cell, CostBlock):
            return "cost", cell.batch_size, cell.context_tokens
        if isinstance(cell, AcceptanceRun):
            return "acceptance", cell.temperature, cell.draft_loops
        return "confirm", cell.batch_size

    def _guess(self, cell: Cell) -> float:
        settings = self.plan.settings
        if isinstance(cell, CostBlock):
            candidates = self.plan.candidates(cell.batch_size)
            read_out = shadowed(candidates) if self.plan.reads_shadows else {}
            arms = (PLAIN, PLAIN, *candidates, *read_out)
            rounds = sum(self._round(cell.batch_size, arm) for arm in arms)
            steps = ENGINE_STEPS * self._round(cell.batch_size, PLAIN)
            prefill = cell.batch_size * cell.context_tokens * self.token_seconds
            return VISITS * (ROUNDS + 1) * rounds + steps + prefill
        if isinstance(cell, AcceptanceRun):
            longest = max(c.num_speculative_tokens for c in self.plan.candidates())
            one = self._round(CHUNK_PROMPTS, Candidate(longest, cell.draft_loops))
            prefill = CHUNK_PROMPTS * settings.prompt_tokens * self.token_seconds
            return settings.screen_tokens / _TOKENS_PER_ROUND * one + prefill
        size = cell.batch_size
        texts = max(size, 2 * len(self.plan.workloads))
        tokens = texts * settings.confirm_tokens / size
        arms = (PLAIN, PLAIN, *cell.candidates)
        each = [
            tokens * self._round(size, arm) / (1.0 if arm == PLAIN else _TOKENS_PER_ROUND)
            for arm in arms
        ]
        return sum(each) + len(arms) * texts * settings.prompt_tokens * self.token_seconds

    def _round(self, batch_size: int, candidate: Candidate) -> float:
        """Return seconds of a round: loop passes, of which a wide one costs a little more."""
        known = sorted(self.round_seconds)
        low, high = known[0], known[-1]
        plain = self.round_seconds[low]
        if high > low:
            share = min(max((batch_size - low) / (high - low), 0.0), 1.0)
            plain += share * (self.round_seconds[high] - plain)
        k, d = candidate.num_speculative_tokens, candidate.draft_loops
        width = 0.05 + 0.2 * (1 - 1 / batch_size)
        full = self.plan.full_loops
        return plain * (d * (k + 1) + (full - d) * (1 + width * k)) / full
