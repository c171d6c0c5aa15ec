"""Time rounds at a given batch size and context, on the engine's own runner.

Times do not depend on what the text says, so contexts are random tokens. A round is run from the
same position again and again: nothing of it is committed, so the context stays what it is.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.offline.cells import CostBlock
from looped_spec.offline.recording import RecordingPolicy
from looped_spec.offline.timing import in_turn
from looped_spec.runtime.request import Request, Status
from looped_spec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from looped_spec.runtime.llm import LLM

VISITS = 2
ROUNDS = 2
"""Rounds timed in each visit of a candidate, behind one that is not."""

ENGINE_STEPS = 9


def measure_cost(llm: LLM, block: CostBlock, candidates: Sequence[Candidate]) -> dict[str, Any]:
    """Return times in ms: per candidate [K, d, median, least], plain decoding a second time, and
    what a step of the engine takes beside its round.

    All candidates are visited in turn, in an order that turns round each time, so that a machine
    that slows down meets all of them.
    """
    runner = llm.engine.runner
    requests: list[Request] = []
    again = (PLAIN, 1)
    ways = [(PLAIN, 0), *((candidate, 0) for candidate in candidates), again]
    if block.repeat % 2:
        ways.reverse()

    def visit(way: tuple[Candidate, int]) -> list[float]:
        runner.round(requests, way[0])
        times = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            runner.round(requests, way[0])
            times.append(1000 * (time.perf_counter() - start))
        return times

    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        _prepare(llm, block, max(c.num_speculative_tokens for c in candidates), requests)
        visits = in_turn(ways, visit, VISITS)
        step_ms = _step_ms(llm)
    finally:
        if collects:
            gc.enable()
        llm.engine.drop(requests)
    times = {way: [ms for visit in found for ms in visit] for way, found in visits.items()}
    plain_ms = statistics.median(times[PLAIN, 0] + times[again])
    return {
        "ms": [
            [c.num_speculative_tokens, c.draft_loops, statistics.median(found), min(found)]
            for (c, number), found in sorted(times.items(), key=lambda item: _order(item[0][0]))
            if not number
        ],
        "again_ms": statistics.median(times[again]),
        "host_ms": max(step_ms - plain_ms, 0.0),
    }


def _prepare(llm: LLM, block: CostBlock, longest: int, requests: list[Request]) -> None:
    """Fill `requests` with some that have so many tokens cached each, and memory for the longest
    drafts."""
    engine = llm.engine
    draw = random.Random(block.context_tokens).randrange
    vocab_size = llm.loaded.adapter.geometry.vocab_size
    params = SamplingParams(
        max_tokens=longest + ENGINE_STEPS + 2, temperature=0.0, ignore_eos=True, seed=0
    )
    llm.set_speculation(0)
    for _ in range(block.batch_size):
        prompt = [draw(vocab_size) for _ in range(block.context_tokens)]
        requests.append(engine.add_request(prompt, params))
    # Those that have been prefilled already would decode while the others are: they are kept apart.
    for request in requests:
        with engine.scheduler.alone(request):
            while request.status is not Status.DECODING:
                engine.step()
    engine.scheduler.schedule(requests, longest)
    engine.runner.prepare(requests)


def _step_ms(llm: LLM) -> float:
    """Return what a step of the engine takes in which all requests decode plainly."""
    policy = RecordingPolicy(PLAIN)
    llm.policy = policy
    for _ in range(ENGINE_STEPS):
        llm.engine.step()
    seconds = [feedback.seconds for feedback in policy.feedback[1:]]
    return 1000 * statistics.median(seconds) if seconds else 0.0


def _order(candidate: Candidate) -> tuple[int, int]:
    return candidate.num_speculative_tokens, candidate.draft_loops
