"""Measures one cell after the other with a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from looped_spec.control.config import AdaptiveSpecConfig, BatchBucket
from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.offline.cells import AcceptanceRun, Cell, CostBlock
from looped_spec.offline.measure_acceptance import measure_acceptance
from looped_spec.offline.measure_cost import measure_cost
from looped_spec.offline.measure_decoding import Prompt, measure_decoding
from looped_spec.offline.plan import CHUNK_PROMPTS, SamplingPlan
from looped_spec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from looped_spec.runtime.llm import LLM


@dataclass(frozen=True)
class Measurer:
    """A model, and what to measure with it.

    Attributes:
        llm: the model; whatever chooses (K, d) is replaced.
        plan: what is measured.
        rows: prompts by workload.
    """

    llm: LLM
    plan: SamplingPlan
    rows: Mapping[str, Sequence[Sequence[int]]]

    def capture(self) -> None:
        """Capture all rounds that will be timed, where this device captures rounds."""
        if self.llm.engine.runner.graphs.is_active:
            most = self.llm.options.max_num_seqs
            sizes = sorted({*self.plan.settings.batch_sizes, most})
            buckets, low = [], 1
            for size in sizes:
                arms = (PLAIN, *self.plan.candidates(size))
                buckets.append(BatchBucket(low, size, arms))
                low = size + 1
            config = AdaptiveSpecConfig(self.plan.full_loops, tuple(buckets))
            self.llm.set_adaptive_speculation(config)

    def measure(self, cell: Cell) -> dict[str, Any]:
        """Return the data of a cell, as it is kept."""
        if isinstance(cell, CostBlock):
            candidates = self.plan.candidates(cell.batch_size)
            return measure_cost(self.llm, cell, candidates, reads_shadows=self.plan.reads_shadows)
        if isinstance(cell, AcceptanceRun):
            return self._acceptance(cell)
        tokens = self.plan.settings.confirm_tokens
        prompts = self._mixed(tokens)
        least = max(cell.batch_size, min(2 * len(self.rows), len(prompts))) * tokens
        return measure_decoding(self.llm, cell, prompts, least)

    def _acceptance(self, run: AcceptanceRun) -> dict[str, Any]:
        first = run.chunk * CHUNK_PROMPTS
        prompts = self.rows[run.workload][first : first + CHUNK_PROMPTS]
        candidates = self.plan.candidates()
        longest = max(c.num_speculative_tokens for c in candidates)
        others = {c.draft_loops for c in candidates} - {run.draft_loops}
        params = self._params(self.plan.settings.screen_tokens, run.temperature)
        candidate = Candidate(longest, run.draft_loops)
        shadows = sorted(others) if self.plan.reads_shadows else ()
        return measure_acceptance(self.llm, prompts, candidate, shadows, params, first)

    def _mixed(self, max_tokens: int) -> list[Prompt]:
        """Return all prompts, of each workload one in turn, at each temperature in turn."""
        count = max(map(len, self.rows.values()))
        prompts: list[Prompt] = []
        for number in range(count):
            for rows in self.rows.values():
                if number < len(rows):
                    temperatures = self.plan.settings.temperatures
                    temperature = temperatures[number % len(temperatures)]
                    params = self._params(max_tokens, temperature, len(prompts))
                    prompts.append((rows[number], params))
        return prompts

    def _params(self, max_tokens: int, temperature: float, seed: int = 0) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            ignore_eos=self.plan.settings.ignore_eos,
            seed=seed,
        )
