"""Decode real texts at a steady batch size, with each finalist and plainly, in turn."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.offline.cells import ConfirmBlock
from looped_spec.offline.recording import RecordingPolicy
from looped_spec.offline.timing import in_turn
from looped_spec.runtime.request import Request
from looped_spec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from looped_spec.runtime.llm import LLM

Prompt = tuple[Sequence[int], SamplingParams]

MAX_IDLE_REQUESTS = 256
"""Requests in a row that may end with their first token before a run gives up."""


def measure_decoding(
    llm: LLM, block: ConfirmBlock, prompts: Sequence[Prompt], min_tokens: int
) -> dict[str, Any]:
    """Return per way [K, d, tokens, seconds, rounds], plain decoding first and last.

    Whenever a request ends the next one starts; a run ends once `min_tokens` tokens were committed
    in rounds of the full batch, and these rounds alone are counted. Prefill is not.
    """
    ways = [(PLAIN, 0), *((candidate, 0) for candidate in block.candidates), (PLAIN, 1)]
    order = ways[::-1] if block.repeat % 2 else ways
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        found = in_turn(
            order, lambda way: _run(llm, way[0], block.batch_size, prompts, min_tokens), 1
        )
    finally:
        if collects:
            gc.enable()
    return {
        "runs": [
            [way[0].num_speculative_tokens, way[0].draft_loops, *found[way][0]] for way in ways
        ]
    }


def _run(
    llm: LLM, candidate: Candidate, batch_size: int, prompts: Sequence[Prompt], min_tokens: int
) -> tuple[int, float, int]:
    """Return tokens, seconds and rounds of the full batch."""
    policy = RecordingPolicy(candidate)
    llm.policy = policy
    engine = llm.engine
    source = itertools.cycle(prompts)
    running = _start(llm, source, batch_size)
    tokens = rounds = idle = 0
    seconds = 0.0
    try:
        while tokens < min_tokens and idle < MAX_IDLE_REQUESTS:
            before = len(policy.feedback)
            engine.step()
            for feedback in policy.feedback[before:]:
                if len(feedback.proposed) == batch_size:
                    tokens += batch_size + sum(feedback.accepted)
                    seconds += feedback.seconds
                    rounds += 1
            ended = [request for request in running if request.finish_reason is not None]
            idle += sum(not request.metrics.num_rounds for request in ended)
            running = [request for request in running if request.finish_reason is None]
            running += _start(llm, source, batch_size - len(running))
    finally:
        engine.drop(running)
    return tokens, seconds, rounds


def _start(llm: LLM, source: Iterator[Prompt], count: int) -> list[Request]:
    return [
        llm.engine.add_request(tokens, params) for tokens, params in itertools.islice(source, count)
    ]
