"""When something is run only to learn from it, and what that may lose."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from looped_spec.control.goodput_settings import GoodputSettings


@dataclass
class Burst:
    """A probe of one or more rounds of one candidate.

    Attributes:
        bucket: the bucket it belongs to.
        position: what is probed.
        limit: most rounds.
        is_off: plain decoding is current: the question is whether drafting pays again.
        issued: rounds handed out.
        returned: rounds whose outcome is known.
        trials: first-position trials seen.
        hits: how many of them were hits.
        waited: rounds since the last one was handed out.
    """

    bucket: int
    position: int
    limit: int
    is_off: bool
    issued: int = 0
    returned: int = 0
    trials: int = 0
    hits: int = 0
    waited: int = 0


class ProbeBudget:
    """Credit for lost time, in rounds of what is current: every round earns `loss_budget`, every
    probe spends what it is expected to lose.

    While off, probes come after `interval` rounds; it doubles with each probe that found nothing,
    up to where probes lose `loss_budget` of the time: ceil(rounds * loss / budget).
    """

    def __init__(self, settings: GoodputSettings) -> None:
        self._earned = settings.loss_budget
        self._cap = settings.max_credit_rounds
        self._first_interval = settings.off_probe_interval
        self.credit = settings.start_credit_rounds
        self.interval = self._first_interval
        self.waited = 0.0
        self.spent = 0.0
        self.rounds = 0
        self.burst: Burst | None = None

    def earn(self) -> None:
        """Count one round."""
        credit = self.credit + self._earned
        self.credit = credit if credit < self._cap else self._cap

    def spend(self, loss_rounds: float) -> None:
        """Pay for one round of a probe."""
        self.credit -= loss_rounds
        self.spent += loss_rounds
        self.rounds += 1

    def restart(self) -> None:
        """Probe soon: something has changed."""
        self.interval = self._first_interval
        self.waited = self.interval

    def back_off(self, loss_rounds: float) -> None:
        """Wait longer after a probe that found nothing and lost `loss_rounds` a round."""
        cap = math.ceil(loss_rounds / self._earned) if self._earned else math.inf
        self.interval = max(self._first_interval, min(2 * self.interval, cap))
        self.waited = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a JSON document; a probe under way is not part of it."""
        return {
            "credit": self.credit,
            "interval": self.interval,
            "waited": self.waited,
            "spent": self.spent,
            "rounds": self.rounds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.credit = float(state["credit"])
        self.interval = float(state["interval"])
        self.waited = float(state["waited"])
        self.spent = float(state["spent"])
        self.rounds = int(state["rounds"])
        self.burst = None
