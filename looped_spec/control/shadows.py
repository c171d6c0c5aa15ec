"""When to read out other draft depths beside a round, and what that costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MAX_UNANSWERED = 32
"""Requests for readouts in a row that nothing came of, after which none are made."""

MAX_WAIT_ROUNDS = 256
RATIO_GAIN = 0.05


class ShadowSchedule:
    """Spreads shadow readouts so that they take a given share of the time.

    Args:
        is_available: whether the engine can read out other depths at all.
        ratio: time of a readout of one depth over that of one loop pass; corrected by what rounds
            with readouts take.

    Attributes:
        spent: what readouts took so far, in rounds.
        turn: how often a readout was asked for.
        waited: rounds since then.
    """

    def __init__(self, is_available: bool, ratio: float) -> None:
        self.is_available = is_available
        self.ratio = ratio
        self.spent = 0.0
        self.turn = 0
        self.waited = 0.0
        self._unanswered = 0

    def cost(self, depths: int, loop_rounds: float) -> float:
        """Return what reading out so many depths costs, in rounds of the current candidate;
        `loop_rounds` is the time of one loop pass in such rounds."""
        return depths * self.ratio * loop_rounds

    def wait(self, rounds: int) -> None:
        """Count rounds."""
        self.waited += rounds

    def is_due(self, cost: float, share: float) -> bool:
        """Return whether a readout of this cost now keeps within a share of the time."""
        return self.waited >= self.interval(cost, share)

    def interval(self, cost: float, share: float) -> int:
        """Return rounds between readouts of this cost."""
        return min(math.ceil(cost / share), MAX_WAIT_ROUNDS) if share else MAX_WAIT_ROUNDS

    def take(self, cost: float) -> None:
        """Ask for a readout."""
        self.waited = 0.0
        self.turn += 1
        self.spent += cost
        self._unanswered += 1
        if self._unanswered > MAX_UNANSWERED:
            self.is_available = False

    def answered(self) -> None:
        """Hear that a readout came."""
        self._unanswered = 0

    def learn_cost(self, extra_loops: float, depths: int) -> None:
        """Correct the cost by a round that took `extra_loops` loop passes longer than without."""
        seen = max(0.0, min(extra_loops / depths, 4.0 * self.ratio + 0.5))
        self.ratio += RATIO_GAIN * (seen - self.ratio)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a JSON document."""
        return {
            "is_available": self.is_available,
            "ratio": self.ratio,
            "spent": self.spent,
            "waited": self.waited,
            "turn": self.turn,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.is_available = bool(state["is_available"])
        self.ratio = float(state["ratio"])
        self.spent = float(state["spent"])
        self.waited = float(state["waited"])
        self.turn = int(state["turn"])
        self._unanswered = 0
