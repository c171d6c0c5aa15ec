"""Loads that nobody has looked at: landscapes, batch sizes and devices drawn from a seed.

The hyper-parameters of `goodput` were chosen on suites (a) to (f), A, B and h. What they are worth
elsewhere is told by loads of other kinds: acceptance of each depth, how it falls along a draft, how
it changes and when, which batch sizes come, at how many rows a device stops being free, and what a
round costs beside its loops. All of that is drawn here.
"""

from __future__ import annotations

import math
import random

from control_bench.landscapes import ARMS, FULL_LOOPS, LONGEST, SHADOW_SHARE, survival
from looped_spec.control.plan import Candidate
from looped_spec.control.trace import Survival, Trace, TracePhase

FIRST_SEED = 1001
PHASES = 8
COST_NOISE = 0.03
HOPELESS_SHARE = 0.2
"""Share of texts that are drafted badly at any depth."""


def held_out(count: int, scale: float = 1.0) -> list[Trace]:
    """Return so many traces, those of the seeds from `FIRST_SEED` on."""
    return [_trace(FIRST_SEED + number, scale) for number in range(count)]


def _trace(seed: int, scale: float) -> Trace:
    draw = random.Random(f"held out {seed}")
    loop_ms, other = draw.uniform(0.3, 5.0), draw.uniform(0.0, 1.0)
    free_rows = 2.0 ** draw.uniform(4.0, 9.0)
    texts = [_text(draw) for _ in range(4)]
    sizes = [2 ** draw.randint(0, 6) for _ in range(3)]
    phases = []
    text, size = draw.choice(texts), draw.choice(sizes)
    for _ in range(PHASES):
        what = draw.random()
        if what < 0.7:
            text = draw.choice(texts)
        if what > 0.4:
            size = draw.choice(sizes)
        cost = {arm: _round_ms(size, arm, loop_ms, other, free_rows) for arm in ARMS}
        phases.append(
            TracePhase(
                rounds=max(1, round(scale * draw.choice((150, 300, 600)))),
                batch_size=size,
                context_tokens=512,
                requests=(text,),
                cost_ms=cost,
                table_ms=cost,
                shadow_ms=SHADOW_SHARE * loop_ms,
            )
        )
    return Trace(FULL_LOOPS, ARMS, tuple(phases), f"held out {seed}", cost_noise=COST_NOISE)


def _text(draw: random.Random) -> Survival:
    """Draw the acceptance of a text: log-odds that rise with depth, falling along a draft."""
    logits = draw.gauss(-3.0, 0.5) if draw.random() < HOPELESS_SHARE else draw.gauss(0.5, 1.4)
    rates = []
    for _ in range(FULL_LOOPS - 1):
        rates.append(1.0 / (1.0 + math.exp(-logits)))
        logits += draw.uniform(0.0, 1.5)
    return survival(rates, draw.uniform(0.9, 1.0), LONGEST)


def _round_ms(
    batch_size: int, candidate: Candidate, loop_ms: float, other: float, free_rows: float
) -> float:
    """Return T = d (K + 1) c(B) + (D - d) c(B (K + 1)) + T_other of a device with `free_rows`."""
    k, d = candidate.num_speculative_tokens, candidate.draft_loops
    narrow = math.hypot(1.0, batch_size / free_rows)
    wide = math.hypot(1.0, batch_size * (k + 1) / free_rows)
    return loop_ms * (d * (k + 1) * narrow + (FULL_LOOPS - d) * wide + other)
