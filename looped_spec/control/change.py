"""Tells that the workload has changed, from how far acceptance is off its estimate."""

from __future__ import annotations

DOWN, NONE, UP = -1, 0, 1
BACK = 2
"""What was taken for a change was none."""

MOST_OF_A_ROUND = 0.75
"""Share of the threshold that one round may add: a single round may be a freak."""

RISING = 1.0
"""Log-likelihood above which a probe that looks for a change goes on."""


class ChangeDetector:
    """A two-sided CUSUM on residuals of acceptance, in log-likelihood units.

    Each side sums the evidence for a shift of the log-odds by `logits`: for H hits where E were
    expected with variance V it grows by +-logits (H - E) - logits^2 V / 2 and is never below 0
    (Page 1954; the second-order form of the likelihood ratio of a binomial). An alarm is a sum
    above `threshold`; without a change it takes about exp(threshold) trials to come.

    Attributes:
        up_rounds: rounds since the upward sum was last 0: where that change would have begun.
        down_rounds: likewise for the downward sum.
    """

    __slots__ = ("_down", "_logits", "_penalty", "_threshold", "_up", "down_rounds", "up_rounds")

    def __init__(self, logits: float, threshold: float) -> None:
        self._logits = logits
        self._penalty = logits * logits / 2
        self._threshold = threshold
        self.reset()

    def reset(self) -> None:
        """Forget all evidence of a change."""
        self._up = self._down = 0.0
        self.up_rounds = self.down_rounds = 0

    @property
    def is_rising(self) -> bool:
        """Whether the evidence for an upward change outweighs a single hit that was likely."""
        return self._up > RISING

    def step(self, residual: float, variance: float, alertness: float = 1.0) -> int:
        """Take the residual H - E of one round with its variance V; return UP, DOWN or NONE.

        The threshold is multiplied by `alertness`, below 1 where a change is more likely.
        """
        penalty = self._penalty * variance
        gain = self._logits * residual
        most = MOST_OF_A_ROUND * self._threshold
        up = self._up + min(gain - penalty, most)
        down = self._down + min(-gain - penalty, most)
        if up > 0.0:
            self._up = up
            self.up_rounds += 1
        else:
            self._up = 0.0
            self.up_rounds = 0
        if down > 0.0:
            self._down = down
            self.down_rounds += 1
        else:
            self._down = 0.0
            self.down_rounds = 0
        threshold = self._threshold * alertness
        if up > threshold:
            return UP
        if down > threshold:
            return DOWN
        return NONE

    def state(self) -> list[float]:
        """Return all that `restore` needs."""
        return [self._up, self._down, self.up_rounds, self.down_rounds]

    def restore(self, state: list[float]) -> None:
        """Continue from `state`."""
        self._up, self._down = float(state[0]), float(state[1])
        self.up_rounds, self.down_rounds = int(state[2]), int(state[3])
