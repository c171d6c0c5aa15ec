"""Score tables by bucket, batch size and context, made when first needed."""

from __future__ import annotations

import math
from collections.abc import Mapping

from looped_spec.control.config import AdaptiveSpecConfig
from looped_spec.control.cost_correction import CostCorrection
from looped_spec.control.cost_model import CostModel
from looped_spec.control.plan import PLAIN
from looped_spec.control.score_table import PLAIN_DEPTH, Arm, ScoreTable

BINS_PER_OCTAVE = 4
"""Contexts are told apart in bins of a quarter octave; costs are compared at their middle."""

FIRST_EDGE_TOKENS = 16.0
CELL_BINS = 2 * BINS_PER_OCTAVE
"""Bins of context that share what is learnt of costs."""

MAX_TABLES = 512


class ScoreTables:
    """Makes and keeps score tables.

    Args:
        config: the candidates.
        longest: draft depth -> longest draft of any candidate.
        correction: what is learnt of costs, shared by all tables.
    """

    def __init__(
        self, config: AdaptiveSpecConfig, longest: Mapping[int, int], correction: CostCorrection
    ) -> None:
        self._config = config
        self._cost = CostModel(config)
        self._correction = correction
        depths = sorted(longest)
        self._numbers = {depth: number for number, depth in enumerate(depths)}
        self._longest = [longest[depth] for depth in depths]
        self._allow_plain = config.state_fresh_when_off
        self._tables: dict[tuple[int, int, int], ScoreTable] = {}

    def clear(self) -> None:
        """Forget all tables; what was learnt of costs stays in the correction."""
        self._tables.clear()

    def forbid_plain(self) -> None:
        """Make all tables anew, without plain decoding where there is anything else."""
        self._allow_plain = False
        self._tables.clear()

    def get(self, bucket: int, batch_size: int, context_bin: int) -> ScoreTable:
        """Return the table of a bucket at a batch size and a bin of contexts."""
        key = bucket, batch_size, context_bin
        table = self._tables.get(key)
        if table is None:
            if len(self._tables) >= MAX_TABLES:
                self._tables.clear()
            table = self._tables[key] = self._make(bucket, batch_size, context_bin)
        return table

    def _make(self, bucket: int, batch_size: int, context_bin: int) -> ScoreTable:
        low, high = bin_edges(context_bin)
        context = math.sqrt(low * high) if context_bin else FIRST_EDGE_TOKENS / 2
        size = _size_bin(self._config.padded(batch_size))
        arms = []
        for position, candidate in enumerate(self._config.buckets[bucket].candidates):
            cell = self._correction.cell(size, context_bin // CELL_BINS, candidate)
            arms.append(
                Arm(
                    position,
                    self._numbers.get(candidate.draft_loops, PLAIN_DEPTH),
                    candidate.num_speculative_tokens,
                    self._cost.ms(batch_size, context, candidate),
                    cell,
                )
            )
        candidates = self._config.buckets[bucket].candidates
        return ScoreTable(
            bucket,
            arms,
            self._longest,
            self._correction,
            allow_plain=self._allow_plain,
            loop_ms=self._cost.ms(batch_size, context, PLAIN) / self._config.full_loops,
            edges=(low, high),
            ms_at=lambda position, tokens: self._cost.ms(batch_size, tokens, candidates[position]),
        )


def context_bin(context_tokens: float) -> int:
    """Return the number of the bin of a context, from 0."""
    if context_tokens < FIRST_EDGE_TOKENS:
        return 0
    return int(BINS_PER_OCTAVE * math.log2(context_tokens / FIRST_EDGE_TOKENS)) + 1


def bin_edges(number: int) -> tuple[float, float]:
    """Return the least context of a bin, and that of the next."""
    if number == 0:
        return -math.inf, FIRST_EDGE_TOKENS
    # A hair lower, since powers of 2 and their logarithms are not exact inverses.
    low = FIRST_EDGE_TOKENS * 2.0 ** ((number - 1) / BINS_PER_OCTAVE) * (1.0 - 1e-12)
    return low, FIRST_EDGE_TOKENS * 2.0 ** (number / BINS_PER_OCTAVE)


def _size_bin(rows: int) -> int:
    """Return the number of a bin of batch sizes, two an octave."""
    octave = rows.bit_length()
    return 2 * octave + (rows * rows > 1 << (2 * octave - 1))
