"""The cost of any candidate before anything is measured online: the table, completed by formula."""

from __future__ import annotations

from looped_spec.control.config import AdaptiveSpecConfig
from looped_spec.control.cost import CostTable, analytic_ms
from looped_spec.control.plan import PLAIN, Candidate

ROW_COST = 0.005
"""Cost of one more row of a loop pass, over that of a pass: between the ideal formula, where rows
are free, and a device without parallel work, where it is 1."""


class CostModel:
    """Times of rounds in ms; without a table in units of one loop pass."""

    def __init__(self, config: AdaptiveSpecConfig) -> None:
        self._full_loops = config.full_loops
        self._table: CostTable | None = config.cost
        self._pad = config.padded

    @property
    def is_measured(self) -> bool:
        """Whether there is a table that belongs to this model and device."""
        return self._table is not None and self._table.mismatch is None

    def ms(self, batch_size: int, context_tokens: float, candidate: Candidate) -> float:
        """Return the time of a round of the padded batch.

        A candidate that the table lacks costs what the formula says relative to one that it has:
        plain decoding if possible.
        """
        rows = self._pad(batch_size)
        if self._table is None:
            return self._formula(rows, candidate)
        known = self._table.ms(rows, context_tokens, candidate)
        if known is not None:
            return known
        anchor = PLAIN if PLAIN in self._table.candidates else self._table.candidates[0]
        anchor_ms = self._table.ms(rows, context_tokens, anchor)
        assert anchor_ms is not None, "the table knows its own candidates"
        return anchor_ms * self._formula(rows, candidate) / self._formula(rows, anchor)

    def shadow_ms(
        self, batch_size: int, context_tokens: float, num_depths: int, ratio: float
    ) -> float:
        """Return what reading out `num_depths` more depths adds to a round: each costs `ratio` of
        one loop pass, and a plain round is `full_loops` passes."""
        plain = self.ms(batch_size, context_tokens, PLAIN)
        return num_depths * ratio * plain / self._full_loops

    def _formula(self, rows: int, candidate: Candidate) -> float:
        return analytic_ms(self._full_loops, candidate, rows=rows, row_cost=ROW_COST)
