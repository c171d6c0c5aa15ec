"""What a candidate may turn out to be worth, given what is not known of it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from looped_spec.control.acceptance import AcceptanceModel
from looped_spec.control.cost_correction import CostCorrection
from looped_spec.control.score_table import PLAIN_DEPTH, Arm, ScoreTable


class Prospects:
    """Scores of candidates under optimism.

    Args:
        acceptance: what is known of drafts.
        correction: what is known of costs.
        optimism: standard deviations by which a candidate may be better than it looks.
    """

    def __init__(
        self, acceptance: AcceptanceModel, correction: CostCorrection, optimism: float
    ) -> None:
        self._acceptance = acceptance
        self._correction = correction
        self._optimism = optimism

    def score(self, table: ScoreTable, arm: Arm) -> float:
        """Return the expected tokens per time of a candidate."""
        return table.score(arm.position, self._acceptance.tokens)

    def best_known(self, table: ScoreTable, current: Arm) -> float:
        """Return the score of the current candidate, or of plain decoding if that is higher."""
        return max(self.score(table, current), table.plain_score)

    def hopes(
        self,
        table: ScoreTable,
        current: Arm,
        arms: Iterable[Arm],
        *,
        jump: float = 0.0,
        floor: float = 0.0,
    ) -> list[tuple[float, Arm]]:
        """Return those of some candidates that may score above `floor` if the current one scores
        as estimated, each behind the score that it may have; `jump` is a variance by which all
        depths may have moved without being seen."""
        optimism, correction = self._optimism, self._correction
        tokens, inverse = self._acceptance.tokens, table.inverse
        # Most are out of the question without a look at what is known of their costs. The bound is
        # a hair low, since rounding may not decide.
        least = floor / math.exp(optimism * correction.most_deviation()) * (1.0 - 1e-9)
        gains: dict[int, list[float]] = {}
        found = []
        for arm in arms:
            _, depth, k, _, cell = arm
            if depth == PLAIN_DEPTH:
                score, gain = table.plain_score, 1.0
            else:
                score = tokens[depth][k] * inverse[depth][k]
                if depth not in gains:
                    gains[depth] = self._gains_of(arm, current, jump)
                gain = gains[depth][k]
            if score * gain > least:
                hope = score * math.exp(optimism * correction.deviation(cell)) * gain
                if hope > floor:
                    found.append((hope, arm))
        return found

    def _gains_of(self, arm: Arm, current: Arm, jump: float) -> list[float]:
        """Return, by K, by what E(K) of a candidate's depth may be higher than it looks."""
        if arm.depth == current.depth:
            return self._gains_behind(arm.depth, current.k)
        variance = self.variance(arm, current) + jump
        return self._gains(arm.depth, self._optimism * math.sqrt(variance))

    def best_draft(self, table: ScoreTable, optimism: float) -> tuple[float, Arm]:
        """Return the best score that any candidate with drafts may have, `optimism` standard
        deviations above what its depth's acceptance is estimated at, and the best as estimated."""
        levels = self._acceptance.levels
        levels.settle()
        gains = {
            depth: self._gains(depth, optimism * math.sqrt(levels.variance(depth)))
            for depth in table.draft_depths
        }
        hope = max(self.score(table, arm) * gains[arm.depth][arm.k] for arm in table.drafts)
        return hope, max(table.drafts, key=lambda arm: (self.score(table, arm), -arm.position))

    def variance(self, arm: Arm, current: Arm) -> float:
        """Return the variance of the log-odds of a candidate's depth, given the current one's."""
        levels = self._acceptance.levels
        if current.depth == PLAIN_DEPTH:
            return levels.variance(arm.depth)
        return levels.free_variance(arm.depth, current.depth)

    def _gains(self, depth: int, logits: float) -> list[float]:
        """Return, by K, by what E(K) of a depth would be multiplied if the log-odds of its first
        draft were higher by `logits`, and acceptance at each further position by the same
        factor."""
        chances = self._acceptance.chances(depth)
        first = chances[0]
        factor = 1.0 / (first + (1.0 - first) * math.exp(-logits))
        total = there = survival = reached = 1.0
        gains = [1.0]
        for chance in chances:
            survival *= chance
            reached *= min(factor * chance, 1.0)
            total += survival
            there += reached
            gains.append(there / total)
        return gains

    def _gains_behind(self, depth: int, seen: int) -> list[float]:
        """Return, by K, by what E(K) of a depth would be multiplied if positions behind the first
        `seen`, which do not run, were accepted as often as they may be."""
        gains = [1.0]
        total = there = survival = reached = 1.0
        for position, chance in enumerate(self._acceptance.chances(depth)):
            survival *= chance
            total += survival
            if position >= seen:
                trials = self._acceptance.trials_behind(depth, position)
                chance += self._optimism * math.sqrt(chance * (1.0 - chance) / trials)
            reached *= min(chance, 1.0)
            there += reached
            gains.append(there / total if position >= seen else 1.0)
        return gains

    def loss(self, table: ScoreTable, arm: Arm, current: Arm) -> float:
        """Return what a round of a candidate is expected to lose, in rounds of the current one."""
        here = self.score(table, current)
        share = 1.0 - self.score(table, arm) / here if here > 0.0 else 0.0
        return share * table.cost(arm) / table.cost(current)

    def cheapest(self, table: ScoreTable, depth: int, current: Arm) -> Arm:
        """Return the candidate of a depth that loses least."""
        arms = table.of_depth[depth]
        return min(arms, key=lambda arm: (self.loss(table, arm, current), arm.position))
