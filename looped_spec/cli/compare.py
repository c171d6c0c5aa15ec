"""Plain and speculative decoding side by side, on the same model, prompts and batch."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from looped_spec.cli.generation import Prompt, Setting, run_batch
from looped_spec.errors import ConfigError
from looped_spec.offline.timing import Difference, Generated, Run, first_difference, in_turn
from looped_spec.runtime.outputs import SpeculationMetrics
from looped_spec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from looped_spec.runtime.llm import LLM

WARM_UP_TOKENS = 16


def nothing_to_compare() -> ConfigError:
    """Return the error for a comparison of plain decoding with itself."""
    return ConfigError(
        "--compare has nothing to compare: speculation is off; set --num-speculative-tokens to 1 "
        "or more, and --draft-loops"
    )


def no_comparison_of_early_exit() -> ConfigError:
    """Return the error for a comparison of speculation in a run that cannot have any."""
    return ConfigError(
        "--compare times speculation against plain decoding, and early exit is neither: leave out "
        "--compare, or all flags of early exit"
    )


@dataclass(frozen=True)
class Side:
    """The timed runs of one way of decoding; `outputs` are those of the first."""

    runs: list[Run]

    @property
    def outputs(self) -> list[Generated]:
        """The texts of the first run."""
        return self.runs[0].outputs

    @property
    def rates(self) -> list[float]:
        """Tokens per second of every run."""
        return [run.tokens_per_second for run in self.runs if run.tokens_per_second is not None]

    @property
    def tokens_per_second(self) -> float | None:
        """The median over the runs."""
        return statistics.median(self.rates) if self.rates else None


@dataclass(frozen=True)
class Comparison:
    """What `compare` measured."""

    setting: Setting
    plain: Side
    speculative: Side
    difference: Difference | None

    @property
    def metrics(self) -> SpeculationMetrics:
        """The counts of all speculative runs together."""
        total = SpeculationMetrics()
        for run in self.speculative.runs:
            total.add(run.metrics)
        return total

    @property
    def speedup(self) -> float | None:
        """Median rate of speculative decoding by that of plain decoding."""
        plain, speculative = self.plain.tokens_per_second, self.speculative.tokens_per_second
        return speculative / plain if plain and speculative else None

    @property
    def predicted_speedup(self) -> float | None:
        """What the ideal model predicts from the measured acceptance; None without drafts, and
        where K and d were not the same in every round."""
        rate, candidate = self.metrics.draft_acceptance_rate, self.setting.candidate
        if rate is None or candidate is None:
            return None
        k, d = candidate.num_speculative_tokens, candidate.draft_loops
        return predicted_speedup(self.setting.full_loops, k, d, rate)


def predicted_speedup(
    full_loops: int, num_speculative_tokens: int, draft_loops: int, acceptance_rate: float
) -> float:
    """Return S = D(1 + K alpha) / (D + d K), the speedup of the RFC's idealized model.

    It counts loop passes only: a pass over many rows costs one over a single row, nothing else
    costs anything.
    """
    useful = 1 + num_speculative_tokens * acceptance_rate
    return full_loops * useful / (full_loops + draft_loops * num_speculative_tokens)


def compare(
    llm: LLM,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    repeats: int,
    progress: Callable[[], object] = lambda: None,
) -> Comparison:
    """Time plain decoding and the speculation that `llm` is set to, `repeats` runs of each.

    Each gets a short untimed warm-up; then they alternate, and so does which of them goes first,
    so that a machine that slows down meets both. What chooses (K, d) goes on from run to run with
    what it has learnt. `progress` is called after every run, never within one. The model is left
    set as it was.
    """
    setting, policy = Setting.of(llm), llm.policy
    if setting.is_off:
        raise nothing_to_compare()
    short = [
        dataclasses.replace(param, max_tokens=min(param.max_tokens, WARM_UP_TOKENS))
        for param in params
    ]

    def run(speculates: bool, params: Sequence[SamplingParams]) -> Run:
        if speculates:
            llm.policy = policy
        else:
            llm.set_speculation(0)
        return run_batch(llm, prompts, params)

    try:
        in_turn((False, True), lambda way: run(way, short), 1, progress)
        runs = in_turn((False, True), lambda way: run(way, params), repeats, progress)
    finally:
        llm.policy = policy
    everything = [*runs[False], *runs[True]]
    found = (first_difference(everything[0].outputs, run.outputs) for run in everything[1:])
    difference = next((place for place in found if place is not None), None)
    return Comparison(setting, Side(runs[False]), Side(runs[True]), difference)
