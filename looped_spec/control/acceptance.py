"""What the workload accepts, per draft depth and position, whatever batch it was seen in."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from looped_spec.control.change import NONE, UP, ChangeDetector
from looped_spec.control.coupling import DepthCoupling, Level
from looped_spec.control.goodput_settings import GoodputSettings

RECENT_ROUNDS = 64
"""Rounds that are kept to start anew from, once a change is found to have happened."""

Counts = tuple[list[int], list[int]]
"""Conditional trials and hits per position: of those requests that had the first i drafts accepted
and a draft at position i, how many had that one accepted too. Their quotient estimates p_i whatever
K was and however many drafts of a request were valid."""

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
    """Estimates p_i of every depth by discounted Beta counts, and from them E(K).

    p_i = (hits + m prior) / (trials + m). The prior of a position is a little below the estimate of
    the position before; that of a depth's first position comes from the other depths. Evidence is
    discounted per trial, so a large batch adapts in few rounds and a single request does not
    twitch. Of all evidence, a change that was found leaves what came after it and the weight of a
    few trials.

    Depths are numbered in ascending order from 0.

    Attributes:
        depths: the draft depths.
        tokens: per depth E(0), E(1), ... up to its longest draft.
        memory_trials: trials after which an observation has lost two thirds of its weight.
        changes: how many changes were found.
    """

    def __init__(
        self, longest: Mapping[int, int], settings: GoodputSettings, coupling: DepthCoupling
    ) -> None:
        self.depths = tuple(sorted(longest))
        self.memory_trials = settings.evidence_trials
        self.changes = 0
        self.coupling = coupling
        self._decay = settings.position_decay
        self._prior_trials = settings.position_prior_trials
        self._kept_trials = settings.kept_trials
        self._sure_trials = settings.sure_trials
        sizes = [longest[depth] for depth in self.depths]
        self._hits = [[0.0] * size for size in sizes]
        self._trials = [[0.0] * size for size in sizes]
        self._chances = [[0.5] * size for size in sizes]
        self.tokens = [[1.0] * (size + 1) for size in sizes]
        self._learnt = [0.0] * len(sizes)
        # Instead of discounting what was counted, what is counted next weighs more.
        self._weight = 1.0
        self._detector = ChangeDetector(settings.change_logits, settings.change_threshold)
        self._recent: deque[tuple[int, list[int], list[int]]] = deque(maxlen=RECENT_ROUNDS)
        self._priors = coupling.initial()
        for depth in range(len(sizes)):
            self._estimate(depth)

    def record(self, depth: int, counts: Sequence[int], hits: Sequence[int]) -> int:
        """Take in the trials of a round at one depth; return UP, DOWN or NONE for a change that
        they show. The estimates of this depth follow at once, those of others with `couple`."""
        if not counts:
            return NONE
        weight = self._weight = self._weight * (1.0 + counts[0] / self.memory_trials)
        all_hits, trials = self._hits[depth], self._trials[depth]
        chances = self._chances[depth]
        is_sure = trials[0] > self._sure_trials * weight
        residual = variance = 0.0
        for position, count in enumerate(counts):
            hit = hits[position]
            chance = chances[position]
            expected = count * chance
            residual += hit - expected
            variance += expected * (1.0 - chance)
            all_hits[position] += weight * hit
            trials[position] += weight * count
        self._recent.append((depth, list(counts), list(hits)))
        change = NONE
        if is_sure:
            change = self._detector.step(residual, variance)
            if change:
                self._start_anew(change, depth)
        if weight > _MAX_WEIGHT:
            self._rescale(1.0 / weight)
            self._weight = 1.0
        self._estimate(depth)
        return change

    def shadow(self, depth: int, counts: Sequence[int], hits: Sequence[int]) -> None:
        """Take in trials of a depth that did not draft, but was read out beside one that did: they
        age nothing, and raise no alarm."""
        weight = self._weight
        all_hits, trials = self._hits[depth], self._trials[depth]
        for position, (count, hit) in enumerate(zip(counts, hits, strict=True)):
            all_hits[position] += weight * hit
            trials[position] += weight * count
        self._estimate(depth)

    def age(self, trials: float) -> None:
        """Discount all evidence as that many trials would."""
        self._weight *= 1.0 + trials / self.memory_trials

    def keep(self, trials: float) -> None:
        """Discount all evidence to the weight of at most `trials` trials a depth."""
        weight = self._weight
        for depth, counted in enumerate(self._trials):
            if counted[0] > trials * weight:
                self._scale(depth, trials * weight / counted[0])
            self._estimate(depth)
        self._detector.reset()
        self._recent.clear()

    def trials(self, depth: int) -> float:
        """Return what the evidence at the first position of a depth weighs, in trials."""
        return self._trials[depth][0] / self._weight

    def chances(self, depth: int) -> list[float]:
        """Return p_1, p_2, ... of a depth."""
        return self._chances[depth]

    def level_variance(self, depth: int) -> float:
        """Return the variance of the log-odds of a depth's first position."""
        chance = self._chances[depth][0]
        trials = self.trials(depth) + self._priors[depth].trials
        return 1.0 / max(trials * chance * (1.0 - chance), 1e-6)

    def couple(self) -> None:
        """Let every depth learn what the others show."""
        weight = self._weight
        evidence = []
        for all_hits, trials in zip(self._hits, self._trials, strict=True):
            count = trials[0] / weight
            # Half a hit more and half a miss more keep a short run of luck off the ends.
            evidence.append(Level((all_hits[0] / weight + 0.5) / (count + 1.0), count))
        for depth, level in enumerate(evidence):
            if level.trials > 4.0:
                total = self._trials[depth][0]
                fresh = 1.0 - self._learnt[depth] / total
                if fresh > 0.1:
                    self.coupling.learn(depth, evidence, fresh)
                    self._learnt[depth] = total
        self._priors = self.coupling.priors(evidence)
        for depth in range(len(self.depths)):
            self._estimate(depth)

    def _estimate(self, depth: int) -> None:
        """Compute p_i and E(K) of a depth from its counts."""
        weight = self._weight
        prior, trials = self._priors[depth]
        prior_weight, later_weight = trials * weight, self._prior_trials * weight
        decay = self._decay
        chances, tokens = [], [1.0]
        survival = total = 1.0
        for hits, counted in zip(self._hits[depth], self._trials[depth], strict=True):
            chance = (hits + prior_weight * prior) / (counted + prior_weight)
            prior, prior_weight = chance * decay, later_weight
            survival *= chance
            total += survival
            chances.append(chance)
            tokens.append(total)
        self._chances[depth] = chances
        self.tokens[depth] = tokens

    def _start_anew(self, change: int, depth: int) -> None:
        """Keep of all evidence what came since the change began, and a little."""
        detector = self._detector
        rounds = detector.up_rounds if change == UP else detector.down_rounds
        self.changes += 1
        weight = self._weight
        counted = self._trials[depth][0]
        share = min(1.0, self._kept_trials * weight / counted)
        for other in range(len(self.depths)):
            self._scale(other, share)
        recent = list(self._recent)[-rounds:]
        for other, counts, hits in recent:
            all_hits, trials = self._hits[other], self._trials[other]
            for position, (count, hit) in enumerate(zip(counts, hits, strict=True)):
                all_hits[position] += weight * hit
                trials[position] += weight * count
        detector.reset()
        self._recent.clear()
        self.couple()

    def _scale(self, depth: int, share: float) -> None:
        self._hits[depth] = [share * value for value in self._hits[depth]]
        self._trials[depth] = [share * value for value in self._trials[depth]]
        self._learnt[depth] *= share

    def _rescale(self, share: float) -> None:
        for depth in range(len(self.depths)):
            self._scale(depth, share)

    def state_dict(self) -> dict[str, Any]:
        """Return all evidence as a JSON document."""
        return {
            "weight": self._weight,
            "hits": [list(row) for row in self._hits],
            "trials": [list(row) for row in self._trials],
            "learnt": list(self._learnt),
            "detector": self._detector.state(),
            "recent": [list(item) for item in self._recent],
            "offsets": list(self.coupling.offsets),
            "variances": list(self.coupling.variances),
            "priors": [list(level) for level in self._priors],
            "changes": self.changes,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._weight = float(state["weight"])
        self._hits = [list(row) for row in state["hits"]]
        self._trials = [list(row) for row in state["trials"]]
        self._learnt = list(state["learnt"])
        self._detector.restore(state["detector"])
        self._recent.clear()
        self._recent.extend((d, list(n), list(k)) for d, n, k in state["recent"])
        self.coupling.offsets = list(state["offsets"])
        self.coupling.variances = list(state["variances"])
        self._priors = [Level(*level) for level in state["priors"]]
        self.changes = int(state["changes"])
        for depth in range(len(self.depths)):
            self._estimate(depth)
