"""Scores of a bucket's candidates at one batch size and context: expected tokens over cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import mul
from typing import NamedTuple

from looped_spec.control.cost_correction import Cell, CostCorrection

PLAIN_DEPTH = -1
"""Number of the depth of K = 0, beside those of `AcceptanceModel`."""


class Arm(NamedTuple):
    """A candidate as the policy computes with it.

    Attributes:
        position: position in the bucket's candidates.
        depth: number of its draft depth in `AcceptanceModel`, or `PLAIN_DEPTH`.
        k: its K.
        base_ms: expected time of a round before correction, at the middle of the bin of contexts.
        cell: what is learnt of its time.
    """

    position: int
    depth: int
    k: int
    base_ms: float
    cell: Cell


class ScoreTable:
    """E / T of every candidate, kept per depth so that only what changed is computed again.

    Attributes:
        bucket: index of the bucket.
        arms: the candidates, by position.
        drafts: those with drafts.
        draft_depths: the numbers of their depths, ascending.
        of_depth: number of a depth -> its candidates, by position.
        inverse: per depth, 1 / T by K, 0 where (K, d) is no candidate.
        plain: the K = 0 arm, None if the bucket has none.
        plain_score: its score, 1 / T; 0 without it.
        loop_ms: time of one loop pass of a plain round.
        has_drafts: whether anything but K = 0 is in the list.
    """

    def __init__(
        self,
        bucket: int,
        arms: Sequence[Arm],
        longest: Sequence[int],
        correction: CostCorrection,
        *,
        allow_plain: bool,
        loop_ms: float,
        edges: tuple[float, float],
        ms_at: Callable[[int, float], float],
    ) -> None:
        self.bucket = bucket
        self._low, self._high = edges
        self._ms_at = ms_at
        self._lows = [math.nan] * len(arms)
        self._slopes = [0.0] * len(arms)
        self.loop_ms = loop_ms
        self.arms = tuple(arms)
        self._correction = correction
        self._allow_plain = allow_plain
        self.plain = next((arm for arm in arms if arm.depth == PLAIN_DEPTH), None)
        self.drafts = tuple(arm for arm in arms if arm.k)
        self.has_drafts = bool(self.drafts)
        self.draft_depths = tuple(sorted({arm.depth for arm in self.drafts}))
        self.of_depth = {
            depth: tuple(arm for arm in self.drafts if arm.depth == depth)
            for depth in self.draft_depths
        }
        self.plain_score = 0.0
        self.inverse = [[0.0] * (size + 1) for size in longest]
        self._position = [[-1] * (size + 1) for size in longest]
        for arm in arms:
            if arm.k:
                self._position[arm.depth][arm.k] = arm.position
        self._used = [any(p >= 0 for p in row) for row in self._position]
        self._seen: list[list[float] | None] = [None] * len(longest)
        self._tops = [(0.0, -1)] * len(longest)
        self.version = -1
        self.refresh()

    def refresh(self) -> None:
        """Compute all costs again if anything was learnt that may have moved them."""
        if self.version == self._correction.version:
            return
        self.version = self._correction.version
        for arm in self.arms:
            self.set_cost(arm)

    def set_cost(self, arm: Arm) -> None:
        """Compute the cost of one candidate again."""
        inverse = math.exp(-self._correction.correction(arm.cell)) / arm.base_ms
        if arm.depth == PLAIN_DEPTH:
            self.plain_score = inverse if self._allow_plain or not self.has_drafts else 0.0
            self._plain_inverse = inverse
        else:
            self.inverse[arm.depth][arm.k] = inverse
            self._seen[arm.depth] = None

    def expected_ms(self, arm: Arm, context_tokens: float) -> float:
        """Return the expected time of a round before correction, at a context inside the bin.

        Where time grows with the context, a round at one end of the bin takes another time than
        one at the other; that is no news about the candidate which happened to run there.
        """
        position = arm.position
        low, slope = self._lows[position], self._slopes[position]
        if low != low:  # not asked for yet
            low = arm.base_ms
            if self._low > 0.0:
                low = self._ms_at(position, self._low)
                slope = (self._ms_at(position, self._high) - low) / (self._high - self._low)
            self._lows[position], self._slopes[position] = low, slope
        return low + slope * (context_tokens - self._low) if slope else low

    def cost(self, arm: Arm) -> float:
        """Return T of an arm, in ms, without what slows all down at the moment."""
        if arm.depth == PLAIN_DEPTH:
            return 1.0 / self._plain_inverse
        return 1.0 / self.inverse[arm.depth][arm.k]

    def next_k(self, arm: Arm) -> int:
        """Return the next longer K at the depth of a candidate, 0 if it is the longest."""
        longer = [other.k for other in self.of_depth.get(arm.depth, ()) if other.k > arm.k]
        return min(longer, default=0)

    def score(self, position: int, tokens: Sequence[Sequence[float]]) -> float:
        """Return E / T of the candidate at a position; `tokens` is per depth E by K."""
        arm = self.arms[position]
        if arm.k:
            return tokens[arm.depth][arm.k] * self.inverse[arm.depth][arm.k]
        return self.plain_score

    def best(self, tokens: Sequence[list[float]]) -> tuple[float, int]:
        """Return the highest score and its position; the shallowest and shortest on a tie.

        `tokens` must hold another list for a depth whenever its numbers changed.
        """
        if self.plain is None:
            best, position = 0.0, self.arms[0].position
        else:
            best, position = self.plain_score, self.plain.position
        for depth, row in enumerate(tokens):
            if row is not self._seen[depth]:
                self._seen[depth] = row
                if not self._used[depth]:
                    continue
                scores = list(map(mul, row, self.inverse[depth]))
                top = max(scores)
                self._tops[depth] = top, self._position[depth][scores.index(top)]
            if self._tops[depth][0] > best:
                best, position = self._tops[depth]
        return best, position
