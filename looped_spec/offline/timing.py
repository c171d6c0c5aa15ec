"""Timing ways of decoding on one model, in turn, with the tokens beside the seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from looped_spec.runtime.outputs import FinishReason, SpeculationMetrics
from looped_spec.runtime.prompts import OnePrompt
from looped_spec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from looped_spec.runtime.llm import LLM

Way = TypeVar("Way", bound=Hashable)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Generated:
    """The text of one prompt (empty without a tokenizer), its tokens, and why it ended."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class Run:
    """The texts of all prompts in their order; `seconds` are those of the whole call."""

    outputs: list[Generated]
    metrics: SpeculationMetrics
    seconds: float

    @property
    def num_tokens(self) -> int:
        """New tokens of all prompts."""
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens by seconds, prefill included; None if the clock saw no time pass."""
        return self.num_tokens / self.seconds if self.seconds > 0 else None


@dataclass(frozen=True)
class Difference:
    """The first place where two runs chose other tokens; both count from 0."""

    prompt: int
    position: int


def run_prompts(
    llm: LLM,
    prompts: Sequence[OnePrompt],
    params: Sequence[SamplingParams],
    *,
    batch_size: int | None = None,
    use_tqdm: bool = False,
) -> Run:
    """Complete prompts in one call, or `batch_size` at a time, each batch to its end."""
    size = batch_size or max(len(prompts), 1)
    metrics = SpeculationMetrics()
    outputs = []
    start = time.perf_counter()
    for first in range(0, len(prompts), size):
        batch = slice(first, first + size)
        for result in llm.generate(list(prompts[batch]), list(params[batch]), use_tqdm=use_tqdm):
            metrics.add(result.metrics)
            (completion,) = result.outputs
            outputs.append(
                Generated(completion.text, completion.token_ids, completion.finish_reason)
            )
    return Run(outputs, metrics, time.perf_counter() - start)


def in_turn(
    ways: Iterable[Way],
    run: Callable[[Way], Result],
    repeats: int,
    progress: Callable[[], object] = lambda: None,
) -> dict[Way, list[Result]]:
    """Call `run` for every way, `repeats` times, in an order that turns round each time.

    So each way stands as often before as behind any other, and a machine that slows down meets all
    of them. `progress` is called after each run, never within one.
    """
    order = list(ways)
    results: dict[Way, list[Result]] = {way: [] for way in order}
    for repeat in range(repeats):
        for way in order if repeat % 2 == 0 else reversed(order):
            results[way].append(run(way))
            progress()
    return results


def first_difference(one: Sequence[Generated], other: Sequence[Generated]) -> Difference | None:
    """Return the first prompt and position at which the tokens differ, or None."""
    for number, (left, right) in enumerate(zip(one, other, strict=True)):
        if left.token_ids != right.token_ids:
            pairs = zip(left.token_ids, right.token_ids, strict=False)
            shorter = min(len(left.token_ids), len(right.token_ids))
            position = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
            return Difference(number, position)
    return None
