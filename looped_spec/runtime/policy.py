"""What chooses (K, d), as the engine sees it."""

from __future__ import annotations

from typing import Protocol

from looped_spec.control.plan import RoundFeedback, SpeculationPlan


class SpeculationPolicy(Protocol):
    """Decides what each round runs; see `looped_spec.control`."""

    def plan(
        self, batch_size: int, *, context_tokens: int = 0, new_requests: int = 0
    ) -> SpeculationPlan:
        """Return what to run with `batch_size` decoding requests, `new_requests` of them for the
        first time. `context_tokens` is the context by which a round of theirs is as dear as it is:
        their mean, or the longest where attention pads all of them to it."""
        ...

    def observe(self, feedback: RoundFeedback) -> None:
        """Take note of a round's outcome."""
        ...
