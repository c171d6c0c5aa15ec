"""The coupled estimate of all depths against the same computed in full at every step."""

from __future__ import annotations

import math
import random

import pytest

from looped_spec.control.levels import DepthLevels

MEANS = [0.2, 0.9, 1.4]


class FullLevels:
    """Every observation carried to every depth at once: the slow, plain form."""

    def __init__(self, means: list[float], shared: float, own: float) -> None:
        self.x = list(means)
        size = range(len(means))
        self.cov = [[shared**2 + (own**2 if i == j else 0.0) for j in size] for i in size]

    def drift(self, variance: float) -> None:
        self.cov = [[value + variance for value in row] for row in self.cov]

    def observe(self, depth: int, trials: int, hits: int) -> None:
        variance = self.cov[depth][depth]
        # The mode of the posterior, by halving: its derivative falls.
        low, high = -20.0, 20.0
        for _ in range(80):
            x = (low + high) / 2
            chance = 1 / (1 + math.exp(-x))
            if hits - trials * chance - (x - self.x[depth]) / variance > 0:
                low = x
            else:
                high = x
        chance = 1 / (1 + math.exp(-low))
        after = 1 / (trials * chance * (1 - chance) + 1 / variance)
        column = [row[depth] for row in self.cov]
        shift = (low - self.x[depth]) / variance
        self.x = [x + c * shift for x, c in zip(self.x, column, strict=True)]
        gain = (variance - after) / variance**2
        self.cov = [
            [value - gain * column[i] * column[j] for j, value in enumerate(row)]
            for i, row in enumerate(self.cov)
        ]


@pytest.mark.parametrize("runs", [1, 7])
def test_depths_settled_late_are_where_full_steps_would_have_put_them(runs: int) -> None:
    """Without drift between settling, the two are the same but for Newton's last step."""
    draw = random.Random(runs)
    levels, full = DepthLevels(MEANS, 1.2, 0.5), FullLevels(MEANS, 1.2, 0.5)
    for _ in range(12):
        depth = draw.randrange(3)
        levels.settle()
        levels.drift(0.01)
        full.drift(0.01)
        levels.settle()
        for _ in range(runs):
            hits = sum(draw.random() < 0.7 for _ in range(8))
            levels.observe(depth, 8, hits)
            full.observe(depth, 8, hits)
    levels.settle()
    assert [levels.mean(depth) for depth in range(3)] == pytest.approx(full.x, abs=0.02)
    assert [levels.variance(depth) for depth in range(3)] == pytest.approx(
        [full.cov[depth][depth] for depth in range(3)], rel=0.05
    )


def test_the_offset_between_depths_is_remembered_when_the_level_moves() -> None:
    levels = DepthLevels(MEANS[:2], 1.2, 1.0)
    for _ in range(100):
        levels.observe(0, 8, 2)
        levels.observe(1, 8, 7)
    levels.settle()
    apart = levels.mean(1) - levels.mean(0)
    levels.jump(4.0, 0.01)
    for _ in range(50):
        levels.observe(0, 8, 4)
    levels.settle()
    assert levels.mean(0) == pytest.approx(0.0, abs=0.3)
    assert levels.mean(1) - levels.mean(0) == pytest.approx(apart, abs=0.2)


def test_a_doubted_depth_is_less_certain_and_no_other_is() -> None:
    levels = DepthLevels(MEANS, 1.0, 0.2)
    before = [levels.variance(depth) for depth in range(3)]
    levels.doubt(1, 0.5, 4.0)
    levels.doubt(1, 100.0, 4.0)
    assert levels.variance(1) == 4.0
    assert [levels.variance(depth) for depth in (0, 2)] == [before[0], before[2]]


def test_what_is_known_of_one_depth_narrows_another() -> None:
    levels = DepthLevels(MEANS, 1.0, 0.2)
    assert levels.free_variance(1, 0) < 0.1 * levels.variance(1)


@pytest.mark.parametrize("hits", [0, 8])
def test_no_run_of_luck_leads_to_infinity(hits: int) -> None:
    levels = DepthLevels(MEANS, 2.0, 0.5)
    for _ in range(5000):
        levels.drift(0.1)
        levels.observe(0, 8, hits)
    levels.settle()
    values = [levels.mean(depth) for depth in range(3)] + [levels.variance(d) for d in range(3)]
    assert all(math.isfinite(value) for value in values)
    assert all(levels.variance(depth) > 0 for depth in range(3))
