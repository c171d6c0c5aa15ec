"""Tells whether what came after a change bears it out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

CONTRADICTED = 3.0
"""Log-likelihood by which what was believed before must tell better what came after."""

REVIEW_TRIALS = 96
"""First drafts after which a change stands."""

_LEAST = 0.02
"""A chance as close to 0 or 1 as this is taken to be no closer: one trial must not decide."""


class ChangeReview:
    """A sequential likelihood-ratio test of a change that was found (Wald 1945).

    A detector that watches every trial is wrong now and then, and what it was misled by, a run of
    bad luck, is what the new estimates are made of. So the old ones are kept for a while, and both
    foretell what comes next: the old ones as they were, the new ones as they learn. If the old ones
    were the better prophets, the change is taken back. A depth that did not run before tells too,
    as far as depths are believed to move together.

    Args:
        before: what to restore.
        chances: per depth, p_1, p_2, ... as believed before.
        depth: the depth that showed the change.

    Attributes:
        depth: the depth that showed the change.
        rounds: depth, trials and hits of the rounds since.
    """

    def __init__(self, before: Any, chances: Sequence[Sequence[float]], depth: int) -> None:
        self.before = before
        self.depth = depth
        self._chances = [list(row) for row in chances]
        self._evidence = 0.0
        self._trials = 0
        self.rounds: list[tuple[int, list[int], list[int]]] = []

    @property
    def is_over(self) -> bool:
        """Whether the change stands."""
        return self._trials >= REVIEW_TRIALS

    def step(
        self, depth: int, counts: list[int], hits: list[int], chances: Sequence[float]
    ) -> bool:
        """Take in a round, foretold by the depth's present `chances`; return whether the change is
        contradicted."""
        self.rounds.append((depth, counts, hits))
        self._trials += counts[0]
        for count, hit, now, before in zip(
            counts, hits, chances, self._chances[depth], strict=False
        ):
            old = min(max(before, _LEAST), 1.0 - _LEAST)
            new = min(max(now, _LEAST), 1.0 - _LEAST)
            self._evidence += hit * math.log(old / new)
            self._evidence += (count - hit) * math.log((1.0 - old) / (1.0 - new))
        return self._evidence > CONTRADICTED
