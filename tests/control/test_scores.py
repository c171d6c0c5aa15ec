"""Scores of runs: sums over phases, percentiles, and intervals over seeds."""

from __future__ import annotations

import math

import pytest

from looped_spec.control.scores import (
    Estimate,
    percentile,
    probe_tax,
    regret,
    slowdown,
    worst_slowdown,
)
from looped_spec.control.simulate import PhaseRun, settled_from


def test_an_interval_holds_the_mean_and_narrows_with_seeds() -> None:
    few, many = Estimate.of([0.0, 1.0] * 4), Estimate.of([0.0, 1.0] * 100)
    assert few.mean == many.mean == 0.5
    assert few.low < many.low < 0.5 < many.high < few.high
    half = 1.96 * 0.5 / math.sqrt(200)  # the normal interval of as many coin tosses
    assert many.high - many.low == pytest.approx(2 * half, rel=0.15)
    assert Estimate.of([0.25]) == Estimate(0.25, 0.25, 0.25)


def test_percentiles_are_nearest_ranks() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50, 99, 100]
    assert percentile([7.0], 0.99) == 7.0


def test_scores_of_a_trace_are_sums_over_phases_not_means_of_ratios() -> None:
    phases = [
        PhaseRun(1, tokens=10, time_ms=10, best_ms=5, plain_ms=20, probe_ms=1),
        PhaseRun(1, tokens=10, time_ms=90, best_ms=85, plain_ms=60),
    ]
    assert regret(phases) == pytest.approx(100 / 90 - 1)
    assert slowdown(phases) == pytest.approx(100 / 80 - 1)
    assert worst_slowdown(phases) == pytest.approx(0.5)
    assert probe_tax(phases) == pytest.approx(0.01)


def slow_settled_from(good: list[int], window: int, needed: int) -> int:
    window = min(window, len(good))
    needed = min(window, needed)
    for first in range(len(good) - window + 1):
        if good[first] and sum(good[first : first + window]) >= needed:
            return first
    return len(good)


def test_a_phase_is_settled_from_the_first_window_that_is_good_enough() -> None:
    for pattern in range(2**13):
        good = [pattern >> i & 1 for i in range(13)]
        assert settled_from(good, 5, 4) == slow_settled_from(good, 5, 4)
    assert settled_from([1, 1, 1]) == 0
    assert settled_from([0, 1, 1]) == 3  # all of fewer rounds than the window
