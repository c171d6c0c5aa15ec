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
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Way:
    """A kind of round that is timed: a (K, d), which time it is tried, and the depths that are read
    out beside it."""

    candidate: Candidate
    number: int = 0
    shadow_depths: tuple[int, ...] = ()


def shadowed(candidates: Sequence[Candidate]) -> dict[Candidate, tuple[int, ...]]:
    """Return the rounds that are timed with readouts of other depths too, with these depths: plain
    decoding, and short drafts of the deepest depth if there are others."""
    depths = tuple(sorted({c.draft_loops for c in candidates}))
    deepest = min(
        (c for c in candidates if c.draft_loops == depths[-1]),
        key=lambda c: (abs(c.num_speculative_tokens - 2), c.num_speculative_tokens),
    )
    found = {PLAIN: depths, deepest: depths[:-1]}
    return {candidate: others for candidate, others in found.items() if others}


def measure_cost(
    llm: LLM, block: CostBlock, candidates: Sequence[Candidate], *, reads_shadows: bool = False
) -> dict[str, Any]:
    """Return times in ms: per candidate [K, d, median, least], plain decoding a second time, what a
    step of the engine takes beside its round, and if `reads_shadows`, some rounds with readouts of
    other depths, [K, d, how many depths, median].

    All candidates are visited in turn, in an order that turns round each time, so that a machine
    that slows down meets all of them.
    """
    runner = llm.engine.runner
    requests: list[Request] = []
    plain, again = _Way(PLAIN), _Way(PLAIN, 1)
    extra = shadowed(candidates) if reads_shadows else {}
    with_shadows = [_Way(candidate, 0, depths) for candidate, depths in extra.items()]
    ways = [plain, *map(_Way, candidates), *with_shadows, again]
    if block.repeat % 2:
        ways.reverse()

    def visit(way: _Way) -> list[float]:
        runner.round(requests, way.candidate, way.shadow_depths)
        times = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            runner.round(requests, way.candidate, way.shadow_depths)
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
    plain_ms = statistics.median(times[plain] + times[again])
    data: dict[str, Any] = {
        "ms": [
            [*_pair(c), statistics.median(times[_Way(c)]), min(times[_Way(c)])]
            for c in sorted((PLAIN, *candidates), key=_pair)
        ],
        "again_ms": statistics.median(times[again]),
        "host_ms": max(step_ms - plain_ms, 0.0),
    }
    if with_shadows:
        data["shadow_ms"] = [
            [*_pair(way.candidate), len(way.shadow_depths), statistics.median(times[way])]
            for way in with_shadows
        ]
    return data


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


def _pair(candidate: Candidate) -> tuple[int, int]:
    return candidate.num_speculative_tokens, candidate.draft_loops
