"""What a round costs before anything was measured online: a table, or the ideal formula."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.errors import ConfigError, check_int, is_number, reject_unknown, shown_number

SCHEMA_VERSION = 1
_KEYS = ("schema_version", "cells", "fingerprint")


class CostCell(NamedTuple):
    """One measured round: its shape and its time in milliseconds."""

    batch_size: int
    context_tokens: int
    num_speculative_tokens: int
    draft_loops: int
    ms: float


@dataclass(frozen=True)
class CostTable:
    """Round times in ms over (batch size, context, K, d), K = 0 included.

    Between batch sizes and contexts of the table times are interpolated: linearly in the batch
    size, and in the logarithm of the context; outside they stay at the nearest.

    Attributes:
        cells: what was measured, in any order; a shape twice is an error.
        fingerprint: what the times belong to, such as model, device, dtype and version.
        mismatch: why the times belong to something else, None if they fit; they are then no more
            than a prior.
    """

    cells: tuple[CostCell, ...]
    fingerprint: tuple[tuple[str, str], ...] = ()
    mismatch: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not self.cells:
            raise ConfigError("cells of a cost table must not be empty")
        seen = set()
        for cell in self.cells:
            check_int("batch_size of a cost cell", cell.batch_size, 1)
            check_int("context_tokens of a cost cell", cell.context_tokens, 0)
            check_int("num_speculative_tokens of a cost cell", cell.num_speculative_tokens, 0)
            check_int("draft_loops of a cost cell", cell.draft_loops, 0)
            ms = cell.ms
            if not is_number(ms) or ms <= 0:
                shown = shown_number(ms)
                raise ConfigError(f"ms of a cost cell must be a positive number, got {shown}")
            if (cell.num_speculative_tokens == 0) != (cell.draft_loops == 0):
                raise ConfigError(
                    "a cost cell has draft_loops 0 exactly if num_speculative_tokens is 0, got "
                    f"{cell.num_speculative_tokens} and {cell.draft_loops}"
                )
            if cell[:4] in seen:
                raise ConfigError(f"cost cell {list(cell[:4])} stands in the table twice")
            seen.add(cell[:4])

    @classmethod
    def of(
        cls,
        times: Mapping[tuple[int, int, int, int], float],
        fingerprint: Mapping[str, str] | None = None,
    ) -> CostTable:
        """Make a table from {(batch size, context, K, d): ms}."""
        cells = tuple(CostCell(*shape, ms) for shape, ms in sorted(times.items()))
        return cls(cells, tuple(sorted((fingerprint or {}).items())))

    @classmethod
    def sampled(
        cls,
        cost: Callable[[int, int, Candidate], float],
        candidates: Iterable[Candidate],
        batch_sizes: Iterable[int],
        contexts: Iterable[int] = (0,),
    ) -> CostTable:
        """Make a table of `cost(batch_size, context_tokens, candidate)` in ms over a grid."""
        contexts = tuple(contexts)
        arms = sorted({PLAIN, *candidates}, key=_order)
        return cls.of(
            {
                (b, length, c.num_speculative_tokens, c.draft_loops): cost(b, length, c)
                for b in batch_sizes
                for length in contexts
                for c in arms
            }
        )

    def ms(self, batch_size: int, context_tokens: float, candidate: Candidate) -> float | None:
        """Return the time of a round in ms; None if the table does not know the candidate."""
        column = self._columns.get(candidate)
        if column is None:
            return None
        sizes = sorted(column)
        low, high, share = _between(sizes, batch_size)
        here = _along_context(column[low], context_tokens)
        if low == high:
            return here
        return here + share * (_along_context(column[high], context_tokens) - here)

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every (K, d) of the table, plain decoding first."""
        return tuple(sorted(self._columns, key=_order))

    @cached_property
    def _columns(self) -> dict[Candidate, dict[int, dict[int, float]]]:
        columns: dict[Candidate, dict[int, dict[int, float]]] = {}
        for b, length, k, d, ms in self.cells:
            columns.setdefault(Candidate(k, d), {}).setdefault(b, {})[length] = ms
        return columns

    def to_json(self) -> dict[str, Any]:
        """Return the table as a JSON document; a cell is [batch size, context, K, d, ms]."""
        return {
            "schema_version": SCHEMA_VERSION,
            "cells": [list(cell) for cell in self.cells],
            "fingerprint": dict(self.fingerprint),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> CostTable:
        """Read what `to_json` wrote."""
        if not isinstance(document, Mapping):
            raise ConfigError(f"a cost table must be a JSON object, got {document!r:.40}")
        reject_unknown(document, _KEYS, "key of a cost table")
        if document.get("schema_version") != SCHEMA_VERSION:
            raise ConfigError(
                f"schema_version of a cost table must be {SCHEMA_VERSION}, "
                f"got {document.get('schema_version')!r}"
            )
        cells = document.get("cells")
        if not isinstance(cells, list) or any(
            not isinstance(cell, list | tuple) or len(cell) != 5 for cell in cells
        ):
            raise ConfigError(
                "cells of a cost table must be lists of batch size, context, K, d, ms"
            )
        fingerprint = document.get("fingerprint", {})
        if not isinstance(fingerprint, Mapping) or any(
            not isinstance(text, str) for text in fingerprint.values()
        ):
            raise ConfigError(
                f"fingerprint of a cost table must be an object of texts, got {fingerprint!r:.40}"
            )
        return cls(tuple(CostCell(*cell) for cell in cells), tuple(sorted(fingerprint.items())))


def analytic_ms(
    full_loops: int,
    candidate: Candidate,
    *,
    loop_ms: float = 1.0,
    rows: int = 1,
    row_cost: float = 0.0,
    readout_ms: float = 0.0,
    overhead_ms: float = 0.0,
) -> float:
    """Return the ideal time of a round, T = c (D + dK) (RFC, "Idealized model"), with its terms.

    A loop pass over n rows costs c(n) = loop_ms * (1 + row_cost * n): drafting is d (K + 1) passes
    over `rows` rows, verifying D - d passes over rows * (K + 1). A round reads out once for each
    draft and once to verify (`readout_ms` each) and has a fixed `overhead_ms`. With `row_cost` 0
    and neither of the other two this is the RFC's formula.
    """
    k, d = candidate.num_speculative_tokens, candidate.draft_loops
    narrow = loop_ms * (1.0 + row_cost * rows)
    wide = loop_ms * (1.0 + row_cost * rows * (k + 1))
    passes = d * (k + 1) * narrow + (full_loops - d) * wide
    return passes + (k + 1) * readout_ms + overhead_ms


def _order(candidate: Candidate) -> tuple[int, int]:
    return candidate.num_speculative_tokens, candidate.draft_loops


def _between(grid: list[int], value: float) -> tuple[int, int, float]:
    """Return the neighbours of `value` in an ascending grid and how far it is between them."""
    place = bisect_left(grid, value)
    if place == 0:
        return grid[0], grid[0], 0.0
    if place == len(grid):
        return grid[-1], grid[-1], 0.0
    low, high = grid[place - 1], grid[place]
    if value == high:
        return high, high, 0.0
    return low, high, (value - low) / (high - low)


def _along_context(times: dict[int, float], context_tokens: float) -> float:
    grid = sorted(times)
    low, high, _ = _between(grid, context_tokens)
    if low == high:
        return times[low]
    share = (
        math.log1p(context_tokens - low) / math.log1p(high - low)
        if low == 0
        else math.log(context_tokens / low) / math.log(high / low)
    )
    return times[low] + share * (times[high] - times[low])
