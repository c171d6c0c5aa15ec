"""One run over all prompts, and by which speculation it was made."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from looped_spec.cli import console
from looped_spec.control.plan import Candidate
from looped_spec.control.static import StaticPolicy
from looped_spec.offline.timing import Generated, Run, run_prompts
from looped_spec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from looped_spec.runtime.llm import LLM


Prompt = str | list[int]
"""A text, or token ids."""


@dataclass(frozen=True)
class Setting:
    """The speculation of a run: who chooses, and what where it is the same in every round."""

    policy: str
    candidate: Candidate | None
    full_loops: int

    @classmethod
    def of(cls, llm: LLM) -> Setting:
        """Return what `llm` is set to."""
        policy = llm.policy
        if isinstance(policy, StaticPolicy):
            return cls("static", policy.candidate, llm.full_loops)
        return cls(llm.explain().policy, None, llm.full_loops)

    @property
    def is_off(self) -> bool:
        """Whether every round decodes plainly."""
        return self.candidate is not None and self.candidate.num_speculative_tokens == 0

    @property
    def label(self) -> str:
        """What is run, in a few words."""
        if self.candidate is None:
            return f"K and d by {self.policy}"
        return f"K={self.candidate.num_speculative_tokens} d={self.candidate.draft_loops}"


def run_batch(
    llm: LLM, prompts: Sequence[Prompt], params: Sequence[SamplingParams], use_tqdm: bool = False
) -> Run:
    """Complete all prompts as one batch."""
    with console.stdout_for_ours_alone():
        return run_prompts(llm, prompts, params, use_tqdm=use_tqdm)


def run_streaming(
    llm: LLM, prompt: Prompt, params: SamplingParams, show: Callable[[str], None]
) -> Run:
    """Complete one prompt and `show` its text as it comes.

    The counts are those of the engine, so nothing else may have run on it before.
    """
    text = ""
    token_ids: list[int] = []
    finish_reason = None
    start = time.perf_counter()
    for chunk in llm.stream([prompt], params):
        if chunk.text:
            show(chunk.text)
        text += chunk.text
        token_ids += chunk.token_ids
        finish_reason = chunk.finish_reason
    seconds = time.perf_counter() - start
    return Run([Generated(text, token_ids, finish_reason)], llm.engine.metrics, seconds)
