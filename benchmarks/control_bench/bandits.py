"""Bandits over all candidates, which know nothing of what tokens and rounds are made of."""

from __future__ import annotations

import math

from control_bench.setting import Baseline, Setting
from looped_spec.control.plan import Candidate, RoundFeedback


class Ucb(Baseline):
    """UCB1 on tokens per millisecond, over that of the best so far, for each batch range; with a
    discount below 1, discounted UCB (Garivier and Moulines, 2011)."""

    def __init__(self, setting: Setting, discount: float = 1.0, width: float = 0.5) -> None:
        super().__init__(setting)
        self.discount, self.width = discount, width
        self.arms = setting.candidates
        self.place = {arm: n for n, arm in enumerate(self.arms)}
        self.states: dict[int, _Counts] = {}

    def choose(self, batch_size: int, context_tokens: int) -> tuple[Candidate, bool]:
        """Return a candidate that was never tried, or the one with the highest bound."""
        state = self._state(batch_size)
        log = math.log(max(state.total * state.scale, 2.0)) / state.scale
        best, best_bound = 0, -math.inf
        for n, count in enumerate(state.counts):
            if count == 0:
                return self.arms[n], False
            bound = state.sums[n] / count / state.top + self.width * math.sqrt(log / count)
            if bound > best_bound:
                best, best_bound = n, bound
        return self.arms[best], False

    def learn(self, candidate: Candidate, batch_size: int, feedback: RoundFeedback) -> None:
        """Add the round's rate, and let what is older fade."""
        state = self._state(batch_size)
        rate = (len(feedback.accepted) + sum(feedback.accepted)) / feedback.seconds
        state.add(self.place[candidate], rate, self.discount)

    def _state(self, batch_size: int) -> _Counts:
        bucket = self.setting.bucket(batch_size)
        if bucket not in self.states:
            self.states[bucket] = _Counts(len(self.arms))
        return self.states[bucket]


class _Counts:
    """Discounted counts and sums; true ones are these times `scale`, so that a round changes one
    arm only."""

    def __init__(self, size: int) -> None:
        self.counts, self.sums = [0.0] * size, [0.0] * size
        self.total, self.scale, self.top = 0.0, 1.0, 1e-12

    def add(self, n: int, rate: float, discount: float) -> None:
        """Fade all by `discount` and add an observation of arm `n`."""
        self.scale *= discount
        weight = 1 / self.scale
        self.counts[n] += weight
        self.sums[n] += weight * rate
        self.total += weight
        self.top = max(self.top, self.sums[n] / self.counts[n])
        if weight > 1e100:
            self.counts = [count * self.scale for count in self.counts]
            self.sums = [value * self.scale for value in self.sums]
            self.total, self.scale = self.total * self.scale, 1.0
