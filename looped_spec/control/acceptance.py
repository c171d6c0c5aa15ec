"""What the workload accepts, per draft depth and position, whatever batch it was seen in."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from looped_spec.control.acceptance_prior import AcceptancePrior
from looped_spec.control.change import BACK, NONE, UP, ChangeDetector
from looped_spec.control.change_review import ChangeReview
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
        trials_since_change: first drafts since the last of them.
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
        # Of all positions, though p_1 comes from the levels.
        self._hits = [[0.0] * size for size in sizes]
        self._trials = [[0.0] * size for size in sizes]
        self._chances = [[0.5] * size for size in sizes]
        self.tokens = [[1.0] * (size + 1) for size in sizes]
        # Instead of discounting what was counted, what is counted next weighs more.
        self._weight = 1.0
        self._detector = ChangeDetector(settings.change_logits, settings.change_threshold)
        self._recent: deque[tuple[int, list[int], list[int]]] = deque(maxlen=RECENT_ROUNDS)
        self._stale_depth = -1
        self._reached = [0] * len(sizes)
        self._since = 0
        self.trials_since_change = math.inf
        self._review: ChangeReview | None = None
        self.couple()

    def believe(self, prior: AcceptancePrior) -> None:
        """Start from earlier counts, before anything is recorded: each depth's are worth as many
        trials as the prior says, or as there were. Those of other depths are left out."""
        seen = {}
        for entry in prior.counts:
            if entry.draft_loops not in self.depths:
                continue
            depth = self.depths.index(entry.draft_loops)
            seen[depth] = (
                entry.first_logit,
                1.0 / max(DRIFT_INFORMATION * min(prior.trials, entry.trials[0]), 1e-9),
            )
            counts = zip(entry.accepted, entry.trials, strict=True)
            for position, (accepted, trials) in enumerate(counts):
                if position < len(self._trials[depth]) and trials:
                    weight = min(prior.trials, trials)
                    self._trials[depth][position] = weight
                    self._hits[depth][position] = weight * accepted / trials
        self.levels.believe(seen)
        self.couple()

    def record(self, depth: int, counts: list[int], hits: list[int]) -> int:
        """Take in the trials of a round at one depth; return UP, DOWN or NONE for a change that
        they show, BACK where they contradict the last one, which is then taken back. `update`
        brings the estimates up to date, `couple` those of all depths."""
        if not counts:
            return NONE
        if self._review is not None and self._contradicts(self._review, depth, counts, hits):
            return BACK
        if depth != self._stale_depth:
            self.update()
            self._stale_depth = depth
        levels = self.levels
        first = counts[0]
        share = first / self.memory_trials
        self._weight = weight = self._weight * (1.0 + share)
        # The drift that makes evidence fade like that: see `DRIFT_INFORMATION`.
        levels.drift(share / (self.memory_trials * DRIFT_INFORMATION))
        all_hits, trials, chances = self._hits[depth], self._trials[depth], self._chances[depth]
        residual = variance = 0.0
        for position, count in enumerate(counts):
            hit = hits[position]
            chance = chances[position]
            expected = count * chance
            residual += hit - expected
            variance += expected - expected * chance
            all_hits[position] += weight * hit
            trials[position] += weight * count
        if position >= self._reached[depth]:
            self._reached[depth] = position + 1
        # What the estimate itself may be off explains a part of the residual.
        trust = 1.0 / (1.0 + variance * levels.variance(depth))
        change = self._detector.step(residual * trust, variance * trust, self.alertness)
        self._recent.append((depth, counts, hits))
        if change:
            self._start_anew(change, depth)
        else:
            levels.observe(depth, first, hits[0])
        self._since += first
        self.trials_since_change += first
        if weight > _MAX_WEIGHT:
            self._scale(1.0 / weight)
            self._weight = 1.0
        return change

    def shadow(self, depth: int, counts: list[int], hits: list[int]) -> None:
        """Take in trials of a depth that did not draft, but was read out beside one that did: they
        age nothing, and raise no alarm. Call `couple` when all depths are in."""
        if counts:
            self.levels.observe(depth, counts[0], hits[0])
            self._count(depth, counts, hits)

    def renew(self) -> None:
        """Take it that the workload has changed if what came last speaks for a higher acceptance:
        drafting was just found to pay again."""
        if self._detector.is_rising:
            self._start_anew(UP, self._recent[-1][0])

    def keep(self, trials: float) -> None:
        """Discount all evidence to the weight of about so many trials."""
        self._review = None
        self.levels.drift(1.0 / (trials * DRIFT_INFORMATION))
        self._shrink(trials)
        self._detector.reset()
        self._recent.clear()
        self.couple()

    @property
    def unproven(self) -> int:
        """The depth that showed the last change, while that may still be taken back; -1 if none."""
        return -1 if self._review is None else self._review.depth

    @property
    def is_rising(self) -> bool:
        """Whether what came last speaks for a higher acceptance than is estimated."""
        return self._detector.is_rising

    def chances(self, depth: int) -> list[float]:
        """Return p_1, p_2, ... of a depth."""
        return self._chances[depth]

    def trials_behind(self, depth: int, position: int) -> float:
        """Return what the estimate of a position behind the first is worth, in trials; positions
        count from 0. The prior, which is a guess, is worth half of what it weighs."""
        return self._trials[depth][position] / self._weight + 0.5 * self._prior_trials

    def update(self) -> None:
        """Bring the estimates of the depth that runs up to date."""
        if self._stale_depth >= 0:
            self._estimate(self._stale_depth)
            self._stale_depth = -1

    def couple(self) -> None:
        """Compute the estimates of every depth anew: another one may have moved them."""
        self.levels.settle()
        self._fade()
        for depth in range(len(self.depths)):
            self._estimate(depth)
        self._stale_depth = -1

    def _fade(self) -> None:
        """Discount what is known of positions that were not tried since the last time: what comes
        before them may have changed."""
        share = math.exp(-self._since / self._settings.unseen_trials)
        for depth, reached in enumerate(self._reached):
            for cells in (self._hits[depth], self._trials[depth]):
                cells[reached:] = [share * value for value in cells[reached:]]
        self._since = 0
        self._reached = [0] * len(self._reached)

    def _count(self, depth: int, counts: list[int], hits: list[int]) -> None:
        """Add trials of all positions."""
        weight = self._weight
        all_hits, trials = self._hits[depth], self._trials[depth]
        reached = min(len(counts), len(trials))
        self._reached[depth] = max(reached, self._reached[depth])
        for position in range(reached):
            all_hits[position] += weight * hits[position]
            trials[position] += weight * counts[position]

    def _estimate(self, depth: int) -> None:
        """Compute p_i and E(K) of a depth."""
        prior_weight = self._prior_trials * self._weight
        prior = prior_weight * self._decay
        chance = 1.0 / (1.0 + math.exp(-self.levels.mean(depth)))
        survival = chance
        total = 1.0 + chance
        chances, tokens = [chance], [1.0, total]
        behind = zip(self._hits[depth], self._trials[depth], strict=True)
        next(behind)
        for hits, counted in behind:
            chance = (hits + prior * chance) / (counted + prior_weight)
            survival *= chance
            total += survival
            chances.append(chance)
            tokens.append(total)
        self._chances[depth] = chances
        self.tokens[depth] = tokens

    def _contradicts(
        self, review: ChangeReview, depth: int, counts: list[int], hits: list[int]
    ) -> bool:
        """Let a round speak for or against the last change; if it is taken back, go on from what
        was believed before with all that came since."""
        self.couple()
        if not review.step(depth, counts, hits, self._chances[depth]):
            if review.is_over:
                self._review = None
            return False
        self._review = None
        self._restore(review.before)
        for round_of in review.rounds:
            self.shadow(*round_of)
        self._detector.reset()
        self._recent.clear()
        self.trials_since_change = math.inf
        self.couple()
        return True

    def _start_anew(self, change: int, depth: int) -> None:
        """Keep of all evidence what came since the change began, and a little."""
        detector, settings = self._detector, self._settings
        self.couple()
        self._review = ChangeReview(self._evidence(), self._chances, depth)
        rounds = detector.up_rounds if change == UP else detector.down_rounds
        self.changes += 1
        self.trials_since_change = 0.0
        self._shrink(settings.kept_trials)
        self.levels.jump(settings.jump_logits**2, settings.own_jump_logits**2)
        for depth, counts, hits in list(self._recent)[-rounds:]:
            self.shadow(depth, counts, hits)
        detector.reset()
        self._recent.clear()
        self.couple()

    def _shrink(self, most: float) -> None:
        """Scale counts down so that none weighs more than `most` trials."""
        highest = max((row[0] for row in self._trials if row), default=0.0)
        if highest > most * self._weight:
            self._scale(most * self._weight / highest)

    def _scale(self, share: float) -> None:
        self._hits = [[share * value for value in row] for row in self._hits]
        self._trials = [[share * value for value in row] for row in self._trials]

    def _evidence(self) -> dict[str, Any]:
        return {
            "weight": self._weight,
            "hits": [list(row) for row in self._hits],
            "trials": [list(row) for row in self._trials],
            "levels": self.levels.state_dict(),
        }

    def _restore(self, evidence: Mapping[str, Any]) -> None:
        self._weight = float(evidence["weight"])
        self._hits = [list(row) for row in evidence["hits"]]
        self._trials = [list(row) for row in evidence["trials"]]
        self.levels.load_state_dict(evidence["levels"])

    def state_dict(self) -> dict[str, Any]:
        """Return all evidence as a JSON document; a review under way is not part of it."""
        return {
            **self._evidence(),
            "detector": self._detector.state(),
            "recent": [list(item) for item in self._recent],
            "changes": self.changes,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._restore(state)
        if any(value < 0.0 for row in (*self._hits, *self._trials) for value in row):
            raise ValueError("hits and trials must be at least 0")
        self._review = None
        self._detector.restore(state["detector"])
        self._recent.clear()
        self._recent.extend((d, list(n), list(k)) for d, n, k in state["recent"])
        self.changes = int(state["changes"])
        self.couple()
