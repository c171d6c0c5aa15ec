"""Tells whether drafts work after a time without them."""

from __future__ import annotations

from typing import Any

LEAST_TRIALS = 32
"""First drafts of old requests after which a resumption is judged."""

LOST_SHARE = 0.15
"""A resumption is lost if its acceptance is below this share of what it was before."""

LEAST_ACCEPTANCE = 0.3
"""Acceptance before plain decoding began, below which a resumption says nothing."""

LOST_RESUMPTIONS = 2
"""Lost resumptions in a row after which plain decoding is taken to spoil drafts."""


class Resumption:
    """Compares, for requests that were there all the time, acceptance before a time of plain
    decoding with that after it.

    An engine whose drafts need state that only drafting keeps up to date accepts next to nothing
    from such requests until they end, while new ones draft as well as ever. Drafting may then only
    stop for good. With fresh state nothing of that is seen, whatever the load does: a workload that
    got harder while drafting was off looks the same once, but not twice in a row.

    Attributes:
        is_stale: whether that was seen.
    """

    def __init__(self) -> None:
        self.is_stale = False
        self._before = 0.0
        self._is_watching = False
        self._trials = self._hits = self._lost = 0

    def stopped(self, acceptance: float) -> None:
        """Hear that plain decoding begins; `acceptance` of the first draft was expected. Where it
        began before and that is not judged yet, the acceptance before that first time counts."""
        if self._is_watching and self._trials:
            return
        self._before = acceptance
        self._is_watching = acceptance >= LEAST_ACCEPTANCE
        self._trials = self._hits = 0

    def joined(self) -> None:
        """Hear that new requests are in the batch: what comes is no longer of old ones alone."""
        self._is_watching = False

    def saw(self, trials: int, hits: int) -> None:
        """Take in first drafts after the stop."""
        if not self._is_watching:
            return
        self._trials += trials
        self._hits += hits
        if self._trials < LEAST_TRIALS:
            return
        self._is_watching = False
        is_lost = self._hits < LOST_SHARE * self._before * self._trials
        self._lost = self._lost + 1 if is_lost else 0
        self.is_stale = self.is_stale or self._lost >= LOST_RESUMPTIONS

    def state_dict(self) -> dict[str, Any]:
        """Return what was found as a JSON document."""
        return {"is_stale": self.is_stale, "lost": self._lost}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.is_stale = bool(state["is_stale"])
        self._lost = int(state["lost"])
