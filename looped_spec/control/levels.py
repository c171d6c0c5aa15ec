"""Acceptance of the first draft at every depth, as one coupled estimate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

_FAR_STEP = 0.25
"""Log-odds beyond which another Newton step is taken."""

_MAX_LOGITS = 8.0


class DepthLevels:
    """Log-odds x_d of the first draft's acceptance at each depth d, with their covariance.

    What one depth shows moves the others by how much they are known to move together: a workload
    that gets easier does so at all depths, and how far depths are apart, once seen, is remembered.
    A round's k hits of n trials are a binomial observation of x_d; its posterior is taken by
    Laplace's method (Newton steps on the log-posterior), and carried to the other depths by
    regression, as in a Kalman filter. All depths drift together with every trial; a depth that
    does not run drifts away on its own, so that it is doubted more the longer it was not seen.

    Args:
        means: prior log-odds per depth, in ascending order of depth.
        level_deviation: prior standard deviation that all depths share.
        offset_deviation: prior standard deviation of each depth beside it.
    """

    def __init__(
        self, means: Sequence[float], level_deviation: float, offset_deviation: float
    ) -> None:
        self.means = list(means)
        shared, own = level_deviation**2, offset_deviation**2
        size = len(self.means)
        self.covariance = [
            [shared + own if row == column else shared for column in range(size)]
            for row in range(size)
        ]

    def observe(self, depth: int, trials: int, hits: int) -> None:
        """Take in that `hits` of `trials` first drafts of a depth were accepted."""
        means, covariance = self.means, self.covariance
        row = covariance[depth]
        variance = row[depth]
        start = x = means[depth]
        for _ in range(4):
            chance = 1.0 / (1.0 + math.exp(-x))
            curvature = trials * chance * (1.0 - chance) + 1.0 / variance
            step = (hits - trials * chance - (x - start) / variance) / curvature
            x += step if -2.0 < step < 2.0 else math.copysign(2.0, step)
            if -_FAR_STEP < step < _FAR_STEP:
                break
        x = min(max(x, -_MAX_LOGITS), _MAX_LOGITS)
        shift = (x - start) / variance
        gain = (variance - 1.0 / curvature) / (variance * variance)
        weights = list(row)
        for other, weight in enumerate(weights):
            means[other] += weight * shift
            share = gain * weight
            covariance[other] = [
                value - share * factor
                for value, factor in zip(covariance[other], weights, strict=True)
            ]

    def drift(self, variance: float) -> None:
        """Let all depths have moved together by this variance."""
        self.covariance = [[value + variance for value in row] for row in self.covariance]

    def doubt(self, depth: int, variance: float, limit: float) -> None:
        """Let a depth have moved on its own by this variance, up to a limit."""
        row = self.covariance[depth]
        if row[depth] < limit:
            row[depth] += variance

    def jump(self, shared: float, own: float) -> None:
        """Let the workload have changed: all depths together by one variance, and each on its own
        by another."""
        self.drift(shared)
        for depth, row in enumerate(self.covariance):
            row[depth] += own

    def chance(self, depth: int) -> float:
        """Return the acceptance expected of a depth."""
        return 1.0 / (1.0 + math.exp(-self.means[depth]))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a JSON document."""
        return {"means": list(self.means), "covariance": [list(row) for row in self.covariance]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.means = [float(mean) for mean in state["means"]]
        self.covariance = [[float(value) for value in row] for row in state["covariance"]]
