"""What probes may lose."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from looped_spec.control.goodput_settings import GoodputSettings


class ProbeBudget:
    """Credit for lost time, in rounds of what is current: every round earns a share, every probe
    spends what it lost.

    While off, probes come after `interval` rounds; it doubles with each probe that found nothing,
    up to where probes lose `loss_budget` of the time: ceil(loss in rounds / budget).

    Attributes:
        credit: rounds that may still be lost.
        spent: rounds that were.
        interval: rounds off before the next probe.
        waited: how many of them have passed.
    """

    def __init__(self, settings: GoodputSettings) -> None:
        self._cap = settings.max_credit_rounds
        self._first_interval = settings.off_probe_interval
        self.credit = settings.start_credit_rounds
        self.spent = 0.0
        self.interval = self._first_interval
        self.waited = 0.0

    def earn(self, rounds: float) -> None:
        """Add to the credit what some rounds have earned."""
        credit = self.credit + rounds
        self.credit = credit if credit < self._cap else self._cap

    def spend(self, loss_rounds: float) -> None:
        """Pay for one round of a probe; a gain is a negative loss."""
        self.credit = min(self.credit - loss_rounds, self._cap)
        self.spent += loss_rounds

    def wait(self, rounds: int) -> bool:
        """Count rounds without drafting; return whether it is time to probe."""
        self.waited += rounds
        return self.waited >= self.interval

    def restart(self) -> None:
        """Probe soon: something has changed."""
        self.interval = self._first_interval
        self.waited = max(self.waited, self.interval - 1.0)

    def pause(self) -> None:
        """Start the shortest wait: drafting was just turned off."""
        self.interval = self._first_interval
        self.waited = 0.0

    def back_off(self, loss_rounds: float, share: float) -> None:
        """Wait longer after a probe that found nothing and lost `loss_rounds`, but no longer than
        keeps the loss at this share."""
        cap = math.ceil(max(loss_rounds, 0.0) / share) if share else math.inf
        self.interval = max(self._first_interval, min(2 * self.interval, cap))
        self.waited = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a JSON document."""
        return {
            "credit": self.credit,
            "spent": self.spent,
            "interval": self.interval,
            "waited": self.waited,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.credit = float(state["credit"])
        self.spent = float(state["spent"])
        self.interval = float(state["interval"])
        self.waited = float(state["waited"])
