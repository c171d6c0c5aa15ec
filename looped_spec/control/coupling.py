"""What evidence at one draft depth says of another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

BASE_PRECISION = 0.5
"""Weight, in units of squared log-odds, of the acceptance expected before anything is seen."""

MIN_OFFSET_VARIANCE = 0.15**2
OFFSET_DRIFT_VARIANCE = 0.02**2
_EDGE = 1e-4


class Level(NamedTuple):
    """A first-position acceptance and how many trials it is worth."""

    chance: float
    trials: float


class DepthCoupling:
    """First-position acceptance of all depths as one level of the workload plus an offset a depth.

    In log-odds, x_d = level + offset_d. The level is what the depths with evidence agree on, each
    weighted by its precision n p (1 - p) and by how well its offset is known; a depth without
    evidence is expected at level + offset. Offsets start as given and are learnt from depths that
    are observed under the same workload.
    """

    def __init__(
        self,
        offsets: Sequence[float],
        base_chance: float,
        offset_deviation: float,
        max_trials: float,
    ) -> None:
        self.offsets = list(offsets)
        self.variances = [offset_deviation**2] * len(self.offsets)
        self._start_variance = offset_deviation**2
        self._base = log_odds(base_chance)
        self._max_trials = max_trials

    def initial(self) -> list[Level]:
        """Return what is expected of each depth before anything was seen."""
        return self.priors([Level(0.5, 0.0)] * len(self.offsets))

    def priors(self, evidence: Sequence[Level]) -> list[Level]:
        """Return for each depth what the others make expect of it.

        `evidence` is per depth the acceptance seen there and the trials behind it.
        """
        levels, weights = self._levels(evidence)
        total = sum(weights) + BASE_PRECISION
        moment = sum(map(float.__mul__, levels, weights)) + BASE_PRECISION * self._base
        found = []
        for offset, variance, level, weight in zip(
            self.offsets, self.variances, levels, weights, strict=True
        ):
            rest = total - weight
            x = (moment - weight * level) / rest + offset
            chance = probability(x)
            trials = 1.0 / ((1.0 / rest + variance) * chance * (1.0 - chance))
            found.append(Level(chance, min(trials, self._max_trials)))
        return found

    def learn(self, depth: int, evidence: Sequence[Level], fresh: float) -> None:
        """Move the offset of a depth towards what it and the other depths show together.

        `fresh` is the share of the evidence at that depth that was not learnt from before.
        """
        levels, weights = self._levels(evidence)
        rest = sum(weights) - weights[depth]
        own = evidence[depth]
        precision = own.trials * own.chance * (1.0 - own.chance)
        if rest < 1.0 or precision < 1.0:
            return
        others = sum(map(float.__mul__, levels, weights)) - weights[depth] * levels[depth]
        surprise = levels[depth] - others / rest
        variance = self.variances[depth] + OFFSET_DRIFT_VARIANCE
        gain = variance / (variance + 1.0 / precision + 1.0 / rest) * min(1.0, fresh)
        self.offsets[depth] += gain * surprise
        variance *= 1.0 - gain
        self.variances[depth] = max(variance, MIN_OFFSET_VARIANCE)

    def _levels(self, evidence: Sequence[Level]) -> tuple[list[float], list[float]]:
        """Return per depth the level that it shows, and the precision of that."""
        levels, weights = [], []
        for (chance, trials), offset, variance in zip(
            evidence, self.offsets, self.variances, strict=True
        ):
            precision = trials * chance * (1.0 - chance)
            levels.append(log_odds(chance) - offset)
            weights.append(precision / (1.0 + precision * variance))
        return levels, weights


def log_odds(chance: float) -> float:
    """Return log(p / (1 - p)), with p kept off its ends."""
    chance = min(max(chance, _EDGE), 1.0 - _EDGE)
    return math.log(chance / (1.0 - chance))


def probability(logits: float) -> float:
    """Return 1 / (1 + exp(-x)), kept off its ends."""
    return min(max(1.0 / (1.0 + math.exp(-logits)), _EDGE), 1.0 - _EDGE)
