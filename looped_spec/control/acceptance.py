"""What the workload accepts, per draft depth and position, whatever batch it was seen in."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from looped_spec.control.change import NONE, UP, ChangeDetector
from looped_spec.control.goodput_settings import GoodputSettings
from looped_spec.control.levels import DepthLevels

RECENT_ROUNDS = 64
"""Rounds that are kept to start anew from, once a change is found to have happened."""

Counts = tuple[list[int], list[int]]
"""Conditional trials and hits per position: of those requests that had the first i drafts accepted
and a draft at position i, how many had that one accepted too. Their quotient estimates p_i whatever
K was and however many drafts of a request were valid."""

DRIFT_INFORMATION = 0.2
"""Information of a trial on the log-odds, p (1 - p), at a usual p. A level that drifts by variance
q per trial is estimated from about n = 1 / sqrt(q p (1 - p)) trials: q = 1 / (n^2 p (1 - p))."""

_MAX_WEIGHT = 1e100


def count_trials(proposed: Sequence[int], accepted: Sequence[int], longest: int) -> Counts | None:
    """Return the conditional trials of a round; None if its numbers contradict themselves.

    `proposed` and `accepted` are per request, none above `longest`. Positions that no request
    reached are left out.
    """
    counts: list[int] = []
    hits: list[int] = []
    alive = len(proposed)
    if alive != len(accepted):
        return None
    if alive and proposed.count(longest) == alive:
        for position in range(longest):
            counts.append(alive)
            alive -= accepted.count(position)
            hits.append(alive)
            if not alive:
                return counts, hits
        return (counts, hits) if accepted.count(longest) == alive else None
    for p, a in zip(proposed, accepted, strict=True):
        if not 0 <= a <= p <= longest:
            return None
        reached = min(p, a + 1)
        while len(counts) < reached:
            counts.append(0)
            hits.append(0)
        for position in range(reached):
            counts[position] += 1
        for position in range(a):
            hits[position] += 1
    return counts, hits


class AcceptanceModel:
    """Estimates p_i of every depth, and from them E(K).

    Where drafts begin, p_1, all depths are one coupled estimate (`DepthLevels`). Further positions
    are discounted Beta counts, p_i = (hits + m prior) / (trials + m), with a prior a little below
    the estimate of the position before. Evidence is discounted per trial, so a large batch adapts
    in few rounds and a single request does not twitch. Of all evidence, a change that was found
    leaves what came after it and the weight of a few trials.

    Depths are numbered in ascending order from 0.

    Attributes:
        depths: the draft depths.
        levels: p_1 of all depths.
        tokens: per depth E(0), E(1), ... up to its longest draft; a new list whenever it changes.
        memory_trials: trials after which an observation has lost two thirds of its weight.
        changes: how many changes were found.
        alertness: factor on the evidence that a change needs: below 1 where long was not looked.
    """

    def __init__(
        self, longest: Mapping[int, int], settings: GoodputSettings, levels: DepthLevels
    ) -> None:
        self.depths = tuple(sorted(longest))
        self.memory_trials = settings.evidence_trials
        self.changes = 0
        self.alertness = 1.0
        self.levels = levels
        self._settings = settings
        self._decay = settings.position_decay
        self._prior_trials = settings.position_prior_trials
        sizes = [longest[depth] for depth in self.depths]
        # Of positions 2, 3, ...
        self._hits = [[0.0] * (size - 1) for size in sizes]
        self._trials = [[0.0] * (size - 1) for size in sizes]
        self._chances = [[0.5] * size for size in sizes]
        self.tokens = [[1.0] * (size + 1) for size in sizes]
        # Instead of discounting what was counted, what is counted next weighs more.
        self._weight = 1.0
        self._detector = ChangeDetector(settings.change_logits, settings.change_threshold)
        self._recent: deque[tuple[int, list[int], list[int]]] = deque(maxlen=RECENT_ROUNDS)
        self.couple()

    def record(self, depth: int, counts: list[int], hits: list[int]) -> int:
        """Take in the trials of a round at one depth; return UP, DOWN or NONE for a change that
        they show. The estimates of this depth follow at once, those of others with `couple`."""
        if not counts:
            return NONE
        trials = counts[0]
        share = trials / self.memory_trials
        self._weight *= 1.0 + share
        # The drift that makes evidence fade like that: see `DRIFT_INFORMATION`.
        self.levels.drift(share / (self.memory_trials * DRIFT_INFORMATION))
        change = self._detect(depth, counts, hits)
        self._recent.append((depth, counts, hits))
        if change:
            self._start_anew(change)
        else:
            self._add(depth, counts, hits)
            self._estimate(depth)
        if self._weight > _MAX_WEIGHT:
            self._scale(1.0 / self._weight)
            self._weight = 1.0
        return change

    def shadow(self, depth: int, counts: list[int], hits: list[int]) -> None:
        """Take in trials of a depth that did not draft, but was read out beside one that did: they
        age nothing, and raise no alarm."""
        if counts:
            self._add(depth, counts, hits)
            self._estimate(depth)

    def keep(self, trials: float) -> None:
        """Discount all evidence to the weight of about so many trials."""
        self.levels.drift(1.0 / (trials * DRIFT_INFORMATION))
        most = max((row[0] for row in self._trials if row), default=0.0)
        if most > trials * self._weight:
            self._scale(trials * self._weight / most)
        self._detector.reset()
        self._recent.clear()
        self.couple()

    @property
    def is_rising(self) -> bool:
        """Whether what came last speaks for a higher acceptance than is estimated."""
        return self._detector.is_rising

    def chances(self, depth: int) -> list[float]:
        """Return p_1, p_2, ... of a depth."""
        return self._chances[depth]

    def couple(self) -> None:
        """Compute the estimates of every depth anew: another one may have moved them."""
        for depth in range(len(self.depths)):
            self._estimate(depth)

    def _detect(self, depth: int, counts: list[int], hits: list[int]) -> int:
        residual = variance = 0.0
        for position, count in enumerate(counts):
            chance = self._chances[depth][position]
            expected = count * chance
            residual += hits[position] - expected
            variance += expected * (1.0 - chance)
        # What the estimate itself may be off explains a part of the residual.
        trust = 1.0 / (1.0 + variance * self.levels.covariance[depth][depth])
        return self._detector.step(residual * trust, variance * trust, self.alertness)

    def _add(self, depth: int, counts: list[int], hits: list[int]) -> None:
        self.levels.observe(depth, counts[0], hits[0])
        weight = self._weight
        all_hits, trials = self._hits[depth], self._trials[depth]
        for position in range(1, len(counts)):
            all_hits[position - 1] += weight * hits[position]
            trials[position - 1] += weight * counts[position]

    def _estimate(self, depth: int) -> None:
        """Compute p_i and E(K) of a depth."""
        prior_weight = self._prior_trials * self._weight
        decay = self._decay
        survival = chance = self.levels.chance(depth)
        total = 1.0 + survival
        chances, tokens = [chance], [1.0, total]
        for hits, counted in zip(self._hits[depth], self._trials[depth], strict=True):
            chance = (hits + prior_weight * decay * chance) / (counted + prior_weight)
            survival *= chance
            total += survival
            chances.append(chance)
            tokens.append(total)
        self._chances[depth] = chances
        self.tokens[depth] = tokens

    def _start_anew(self, change: int) -> None:
        """Keep of all evidence what came since the change began, and a little."""
        detector, settings = self._detector, self._settings
        rounds = detector.up_rounds if change == UP else detector.down_rounds
        self.changes += 1
        most = max((row[0] for row in self._trials if row), default=0.0)
        if most > settings.kept_trials * self._weight:
            self._scale(settings.kept_trials * self._weight / most)
        self.levels.jump(settings.jump_logits**2, settings.own_jump_logits**2)
        for depth, counts, hits in list(self._recent)[-rounds:]:
            self._add(depth, counts, hits)
        detector.reset()
        self._recent.clear()
        self.couple()

    def _scale(self, share: float) -> None:
        self._hits = [[share * value for value in row] for row in self._hits]
        self._trials = [[share * value for value in row] for row in self._trials]

    def state_dict(self) -> dict[str, Any]:
        """Return all evidence as a JSON document."""
        return {
            "weight": self._weight,
            "hits": [list(row) for row in self._hits],
            "trials": [list(row) for row in self._trials],
            "levels": self.levels.state_dict(),
            "detector": self._detector.state(),
            "recent": [list(item) for item in self._recent],
            "changes": self.changes,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._weight = float(state["weight"])
        self._hits = [list(row) for row in state["hits"]]
        self._trials = [list(row) for row in state["trials"]]
        self.levels.load_state_dict(state["levels"])
        self._detector.restore(state["detector"])
        self._recent.clear()
        self._recent.extend((d, list(n), list(k)) for d, n, k in state["recent"])
        self.changes = int(state["changes"])
        self.couple()
