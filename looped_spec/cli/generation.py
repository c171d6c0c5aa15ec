"""One run over all prompts: what came out, how long it took, what speculation did."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from looped_spec.cli import console
from looped_spec.runtime.outputs import FinishReason, SpeculationMetrics
from looped_spec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from looped_spec.runtime.llm import LLM


Prompt = str | list[int]
"""A text, or token ids."""


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


def run_batch(
    llm: LLM, prompts: Sequence[Prompt], params: Sequence[SamplingParams], use_tqdm: bool = False
) -> Run:
    """Complete all prompts as one batch."""
    start = time.perf_counter()
    with console.stdout_for_ours_alone():
        results = llm.generate(list(prompts), list(params), use_tqdm=use_tqdm)
    seconds = time.perf_counter() - start
    metrics = SpeculationMetrics()
    outputs = []
    for result in results:
        metrics.add(result.metrics)
        (completion,) = result.outputs
        outputs.append(Generated(completion.text, completion.token_ids, completion.finish_reason))
    return Run(outputs, metrics, seconds)


def run_streaming(
    llm: LLM, prompt: Prompt, params: SamplingParams, show: Callable[[str], None]
) -> Run:
    """Complete one prompt and `show` its text as it comes.

    The counts are those of the engine, so nothing else may have run on it before.
    """
    text = ""
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    start = time.perf_counter()
    for chunk in llm.stream([prompt], params):
        if chunk.text:
            show(chunk.text)
        text += chunk.text
        token_ids += chunk.token_ids
        finish_reason = chunk.finish_reason
    seconds = time.perf_counter() - start
    return Run([Generated(text, token_ids, finish_reason)], llm.engine.metrics, seconds)
