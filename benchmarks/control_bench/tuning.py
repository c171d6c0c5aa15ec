"""The RFC's EMA with the best of many random settings, found on the very load it is measured on."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from control_bench.baselines import RfcEma
from control_bench.measure import run_trace
from control_bench.setting import Setting
from looped_spec.control.scores import regret
from looped_spec.control.trace import Trace

DRAFT_LENGTHS = (1, 2, 3, 4, 6, 8)
SCREEN_SEEDS = 2
FINALISTS = 10


@dataclass(frozen=True)
class EmaSettings:
    """What is tuned: for three batch ranges a ladder, and the numbers that move along it."""

    ladders: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    beta: float
    up: float
    down: float
    interval: int
    off: bool

    def policy(self, trace: Trace, seed: int) -> RfcEma:
        """Return a policy with these settings."""
        return RfcEma(Setting(trace, seed), **vars(self))


def random_settings(count: int) -> list[EmaSettings]:
    """Return settings as someone might try them; the same for the same count."""
    draws = random.Random("ema settings")
    found = []
    for _ in range(count):
        depths = draws.choice(((1,), (1,), (2,), (1, 2)))
        up = draws.uniform(0.5, 0.95)
        found.append(
            EmaSettings(
                ladders=tuple((edge, _ladder(draws, depths)) for edge in (7, 31, 2**16)),
                beta=draws.choice((0.05, 0.1, 0.15, 0.2, 0.3, 0.5)),
                up=up,
                down=draws.uniform(0.1, up - 0.05),
                interval=draws.choice((2, 4, 8, 16)),
                off=draws.random() < 0.6,
            )
        )
    return found


def _ladder(draws: random.Random, depths: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return some draft lengths from 1 on; of two depths the deeper one joins at a random rung."""
    longest = draws.randint(1, len(DRAFT_LENGTHS))
    lengths = DRAFT_LENGTHS[:longest]
    if len(depths) == 1:
        return tuple((k, depths[0]) for k in lengths)
    joins = draws.randint(0, len(lengths) - 1)
    return tuple((k, depths[0]) for k in lengths[: joins + 1]) + tuple(
        (k, depths[1]) for k in lengths[joins:]
    )


def tune(
    trace: Trace,
    seeds: Sequence[int],
    count: int,
    progress: Callable[[int], object] = lambda rounds: None,
) -> dict[str, Any]:
    """Return the lowest mean regret of `count` settings on a trace: settings, regret per seed.

    All run with the first seeds, the best of them with all: what is found may be a little above
    the best of all.
    """
    screened = []
    for settings in random_settings(count):
        runs = run_trace(settings.policy, trace, seeds[:SCREEN_SEEDS])
        progress(len(runs) * trace.rounds)
        screened.append((sum(map(regret, runs)) / len(runs), settings))
    screened.sort(key=lambda pair: pair[0])
    finals = []
    for _, settings in screened[:FINALISTS]:
        runs = run_trace(settings.policy, trace, seeds)
        progress(len(runs) * trace.rounds)
        finals.append(([regret(phases) for phases in runs], settings))
    best, chosen = min(finals, key=lambda pair: sum(pair[0]))
    return {
        "regret": best,
        "settings": asdict(chosen),
        "median_of_all": screened[len(screened) // 2][0],
        "tried": count,
    }
