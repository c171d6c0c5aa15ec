"""Acceptance of the first draft at every depth, as one coupled estimate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

_FAR_STEP = 0.25
"""Log-odds beyond which another Newton step is taken."""

_FAR_MOVE = 0.15
"""Log-odds of movement after which it is carried to the other depths."""

_MAX_STEP = 2.0
_MAX_LOGITS = 8.0


class DepthLevels:
    """Log-odds x_d of the first draft's acceptance at each depth d, with their covariance.

    What one depth shows moves the others by how much they are known to move together: a workload
    that gets easier does so at all depths, and how far depths are apart, once seen, is remembered.
    A round's k hits of n trials are a binomial observation of x_d; its posterior is taken by
    Laplace's method (Newton steps on the log-posterior), and carried to the other depths by
    regression, as in a Kalman filter. All depths drift together with every trial; a depth that
    does not run drifts away on its own, so that it is doubted more the longer it was not seen.

    The depth that runs is kept apart, as a number and its variance, until `settle` carries what it
    showed to the others: that is needed seldom, and costs more.

    Args:
        means: prior log-odds per depth, in ascending order of depth.
        level_deviation: prior standard deviation that all depths share.
        offset_deviation: prior standard deviation of each depth beside it.
    """

    def __init__(
        self, means: Sequence[float], level_deviation: float, offset_deviation: float
    ) -> None:
        self._means = list(means)
        shared, own = level_deviation**2, offset_deviation**2
        size = len(self._means)
        self._rows = [
            [shared + own if row == column else shared for column in range(size)]
            for row in range(size)
        ]
        self._shared, self._own = shared, own
        self._active = -1
        self._x = self._variance = 0.0
        self._drifted = 0.0

    def believe(self, seen: Mapping[int, tuple[float, float]]) -> None:
        """Start from depth -> (log-odds, variance) seen on other workloads, before any observation.

        That is evidence of what all depths share and of each depth's own part, each as uncertain
        as its variance says: seeing many depths of one workload does not make the workload a more
        usual one. A depth that was not seen moves as those that were did on average.
        """
        if not seen:
            return
        shared, own = self._shared, self._own
        prior = shared + own
        shifts = {
            depth: prior / (prior + variance) * (logits - self._means[depth])
            for depth, (logits, variance) in seen.items()
        }
        usual = math.fsum(shifts.values()) / len(shifts)
        self._means = [m + shifts.get(depth, usual) for depth, m in enumerate(self._means)]
        least = min(variance for _, variance in seen.values())
        common = 1.0 / (1.0 / shared + 1.0 / least)
        for depth, row in enumerate(self._rows):
            row[:] = [common] * len(row)
            alone = own
            if depth in seen:
                alone = 1.0 / (1.0 / own + 1.0 / seen[depth][1])
            row[depth] += alone

    def observe(self, depth: int, trials: int, hits: int) -> None:
        """Take in that `hits` of `trials` first drafts of a depth were accepted."""
        if depth != self._active:
            self.settle()
            self._active = depth
            self._x = self._means[depth]
            self._variance = self._rows[depth][depth]
        precision = 1.0 / self._variance
        start = x = self._x
        for _ in range(4):
            chance = 1.0 / (1.0 + math.exp(-x))
            curvature = trials * chance * (1.0 - chance) + precision
            step = (hits - trials * chance - (x - start) * precision) / curvature
            if -_FAR_STEP < step < _FAR_STEP:
                x += step
                break
            x += max(-_MAX_STEP, min(_MAX_STEP, step))
        self._x = max(-_MAX_LOGITS, min(_MAX_LOGITS, x))
        self._variance = 1.0 / curvature

    @property
    def has_moved(self) -> bool:
        """Whether the depth that runs has moved so far that the others should hear of it."""
        return (
            self._active >= 0 and not -_FAR_MOVE < self._x - self._means[self._active] < _FAR_MOVE
        )

    def drift(self, variance: float) -> None:
        """Let all depths have moved together by this variance."""
        self._drifted += variance
        self._variance += variance

    def settle(self) -> None:
        """Carry what the depth that runs has shown to the others."""
        rows, means, active = self._rows, self._means, self._active
        if self._drifted:
            drifted = self._drifted
            self._rows = rows = [[value + drifted for value in row] for row in rows]
            self._drifted = 0.0
        if active < 0:
            return
        weights = rows[active]
        before = weights[active]
        shift = (self._x - means[active]) / before
        gain = (before - min(self._variance, before)) / (before * before)
        for depth, weight in enumerate(weights):
            means[depth] += weight * shift
            share = gain * weight
            rows[depth] = [
                value - share * other for value, other in zip(rows[depth], weights, strict=True)
            ]
        self._active = -1

    def doubt(self, depth: int, variance: float, limit: float) -> None:
        """Let a depth have moved on its own by this variance, up to a limit in all."""
        self.settle()
        row = self._rows[depth]
        row[depth] = max(row[depth], min(row[depth] + variance, limit))

    def jump(self, shared: float, own: float) -> None:
        """Let the workload have changed: all depths together by one variance, and each on its own
        by another."""
        self.drift(shared)
        self.settle()
        for depth, row in enumerate(self._rows):
            row[depth] += own

    def mean(self, depth: int) -> float:
        """Return the log-odds of a depth; up to date for the one that runs, for the others as they
        were when last settled."""
        return self._x if depth == self._active else self._means[depth]

    def variance(self, depth: int) -> float:
        """Return the variance of a depth's log-odds."""
        if depth == self._active:
            return self._variance
        return self._rows[depth][depth] + self._drifted

    def free_variance(self, depth: int, given: int) -> float:
        """Return the variance of a depth's log-odds if another depth's were known."""
        self.settle()
        row = self._rows[depth]
        known = self._rows[given][given]
        return max(row[depth] - row[given] * row[given] / known, 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a JSON document."""
        self.settle()
        return {"means": list(self._means), "covariance": [list(row) for row in self._rows]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._means = [float(mean) for mean in state["means"]]
        self._rows = [[float(value) for value in row] for row in state["covariance"]]
        self._active = -1
        self._drifted = 0.0
