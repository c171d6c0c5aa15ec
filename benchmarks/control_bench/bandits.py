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
        self.counts: dict[int, dict[Candidate, float]] = {}
        self.sums: dict[int, dict[Candidate, float]] = {}
        self.top: dict[int, float] = {}

    def choose(self, batch_size: int, context_tokens: int) -> tuple[Candidate, bool]:
        """Return a candidate that was never tried, or the one with the highest bound."""
        bucket = self.setting.bucket(batch_size)
        counts = self.counts.setdefault(bucket, dict.fromkeys(self.setting.candidates, 0.0))
        sums = self.sums.setdefault(bucket, dict.fromkeys(self.setting.candidates, 0.0))
        for candidate, count in counts.items():
            if count < 1e-3:
                return candidate, False
        log = math.log(max(sum(counts.values()), 2.0))
        top = self.top[bucket]
        return max(
            counts,
            key=lambda c: sums[c] / counts[c] / top + self.width * math.sqrt(log / counts[c]),
        ), False

    def learn(self, candidate: Candidate, batch_size: int, feedback: RoundFeedback) -> None:
        """Add the round's rate."""
        bucket = self.setting.bucket(batch_size)
        counts, sums = self.counts[bucket], self.sums[bucket]
        if self.discount < 1:
            for arm in counts:
                counts[arm] *= self.discount
                sums[arm] *= self.discount
        rate = (len(feedback.accepted) + sum(feedback.accepted)) / feedback.seconds
        counts[candidate] += 1
        sums[candidate] += rate
        self.top[bucket] = max(self.top.get(bucket, 0.0), sums[candidate] / counts[candidate])
