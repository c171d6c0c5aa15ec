"""Learns from round times how far the cost table is off: logarithms of measured over expected."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from looped_spec.control.goodput_settings import check_number
from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.errors import check_int

OUTLIER = math.log(3.0)
"""A round that takes this much longer than expected, such as the first one of a shape that is
compiled on first use, teaches nothing, unless it is one of `MAX_OUTLIERS` + 1 in a row."""

FIRST_SURPRISE = 0.1
"""The first round of a shape is often dearer than those that follow (caches, memory, whatever is
made on first use): if it takes longer than expected by more than this, as a logarithm, the next one
is waited for."""

MAX_OUTLIERS = 4
WORTH_TELLING = 0.005
"""Change of a cell's mean after which its tables are computed again."""

USUAL_DEVIATIONS = 5.0
MAX_ODD_ROUNDS = 4
KNOWN_ROUNDS = 4
"""Rounds after which a cell's own mean says what it costs."""

REGION_PRIOR = 0.5
"""Cells of a region whose common part is believed by half: rounds of a batch size and context are
more often off together (another layout of memory, longer requests among the batch, another clock of
the device) than candidates are on their own."""

FITS = 2
"""Times that candidates and regions are fitted in turn."""

MEMORY_ROUNDS = 64
FAST_GAIN = 0.25
NOISE_FLOOR = 0.01
MOST = 10.0
"""A measured time that is off by more than e to this power is that of a broken clock, whose numbers
would overflow."""

_FARTHEST = 20.0 * MOST
_MOST_ROUNDS = 10**12
"""A saved state beyond these was never learnt."""


class Cell:
    """What is known of one candidate at one size of batch and context.

    `mean` is the mean log-ratio of measured over expected time over the last `MEMORY_ROUNDS`
    rounds, less what all candidates had in common at the time; `rounds` of them were counted.
    `region` is the bin of batch sizes and that of contexts.
    `odd_rounds` counts surprises since its last usual round, `odd_sum` is their sum.
    `has_siblings` tells whether any cell of the same candidate has run.
    """

    __slots__ = (
        "candidate",
        "has_siblings",
        "key",
        "mean",
        "odd_rounds",
        "odd_sum",
        "outliers",
        "region",
        "rounds",
        "told",
    )

    def __init__(self, key: str, region: tuple[int, int], candidate: Candidate) -> None:
        self.key = key
        self.region = region
        self.candidate = candidate
        self.mean = 0.0
        self.told = 0.0
        self.rounds = 0
        self.outliers = 0
        self.odd_sum = 0.0
        self.odd_rounds = 0
        self.has_siblings = False


class CostCorrection:
    """Log-ratios of measured over expected time: a factor common to all candidates, one for each
    depth, one for each candidate, one for each region, and what is left of each cell.

    The common factor follows at once what slows every round down (another process, a hot device),
    and cancels out where candidates are compared. A cell that was run says itself what it costs. A
    cell that was not is expected to be off as others of its candidate, of its depth, or else all
    are, in that order, each with a weight for how many they are, and by what the cells of its
    region are off beside that.

    Args:
        deviation: how far a table is off from cell to cell, before anything is seen: the standard
            deviation of the log-ratio.
        is_scaled: whether expected times are in ms; if not, the first round tells the scale.
    """

    def __init__(self, deviation: float, is_scaled: bool) -> None:
        self._is_scaled = is_scaled
        self._cells: dict[str, Cell] = {}
        self._by_candidate: dict[Candidate, list[Cell]] = {}
        self._deviation = deviation
        self._spread = deviation
        self._noise = 0.05
        self.common = 0.0
        self._odd: Cell | None = None
        self._odd_run = 0
        self._group: dict[Any, tuple[float, float]] = {}
        self._regions: dict[tuple[int, int], float] = {}
        self.version = 0

    def cell(self, size: int, context: int, candidate: Candidate) -> Cell:
        """Return the cell of a candidate in a bin of batch sizes and one of contexts."""
        key = f"{size},{context},{candidate.num_speculative_tokens},{candidate.draft_loops}"
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = Cell(key, (size, context), candidate)
            cell.has_siblings = candidate in self._group
            self._by_candidate.setdefault(candidate, []).append(cell)
        return cell

    def learn(self, cell: Cell, ratio: float) -> bool:
        """Take in log(measured / expected) of a round; return whether the cell's correction moved.

        Of a cell that is known, a small surprise moves the common factor and, little, the cell; a
        large one see `_learn_unusual`.
        """
        ratio = min(max(ratio, -MOST), MOST)
        if cell.rounds < KNOWN_ROUNDS:
            return self._learn_new(cell, ratio)
        surprise = ratio - self.common - cell.mean
        if surprise > OUTLIER and cell.outliers < MAX_OUTLIERS:
            cell.outliers += 1
            return False
        limit = USUAL_DEVIATIONS * self._noise
        if not -limit < surprise < limit:
            return self._learn_unusual(cell, surprise)
        cell.outliers = cell.odd_rounds = 0
        cell.odd_sum = 0.0
        moved = self._settle()
        self._noise += 0.02 * (1.25 * abs(surprise) - self._noise)
        self._noise = max(self._noise, NOISE_FLOOR)
        step = surprise / min(cell.rounds + 1, MEMORY_ROUNDS)
        self.common += FAST_GAIN * (surprise - step)
        cell.mean += step
        cell.rounds += 1
        if -WORTH_TELLING < cell.mean - cell.told < WORTH_TELLING:
            return moved
        cell.told = cell.mean
        self.version += 1
        return True

    def _learn_unusual(self, cell: Cell, surprise: float) -> bool:
        """Keep a surprise until it is clear whose it is: if the next round of another cell is as
        surprising, or this one's are for long without another cell between them, it is common to
        all; if another cell is as usual, it is this cell's own."""
        odd = self._odd
        if odd is not None and odd is not cell and surprise * odd.odd_sum > 0.0:
            self._share((odd.odd_sum + surprise) / (odd.odd_rounds + 1))
            odd.odd_sum, odd.odd_rounds = 0.0, 0
            return False
        if odd is not cell:
            self._odd, self._odd_run = cell, 0
        cell.odd_sum += surprise
        cell.odd_rounds += 1
        self._odd_run += 1
        if self._odd_run >= MAX_ODD_ROUNDS:
            self._share(cell.odd_sum / cell.odd_rounds)
            cell.odd_sum, cell.odd_rounds = 0.0, 0
        return False

    def _share(self, surprise: float) -> None:
        """Give a surprise to all cells."""
        self.common += surprise
        self._odd = None

    def _settle(self) -> bool:
        """Give the surprises that were kept to their own cell, as another one was as usual since;
        a single round's may be a freak, and waits for a second."""
        cell = self._odd
        self._odd = None
        if cell is None or cell.odd_rounds < 2:
            return False
        cell.mean += cell.odd_sum / cell.odd_rounds
        cell.odd_sum, cell.odd_rounds, cell.outliers = 0.0, 0, 0
        cell.rounds = KNOWN_ROUNDS
        self.version += 1
        return True

    def _learn_new(self, cell: Cell, ratio: float) -> bool:
        value = ratio - self.common
        expected = cell.mean if cell.rounds else self._expected(cell)
        if self._cells_known():
            is_first = not cell.rounds and not cell.outliers
            limit = FIRST_SURPRISE if is_first else OUTLIER
            if value - expected > limit and cell.outliers < MAX_OUTLIERS:
                cell.outliers += 1
                return False
        if value - expected < -OUTLIER or cell.outliers:
            # What went before was the outlier: nothing runs too fast by chance.
            cell.rounds = 0
        cell.outliers = 0
        cell.rounds += 1
        cell.mean += (value - cell.mean) / cell.rounds
        self._regroup()
        return True

    def correction(self, cell: Cell) -> float:
        """Return the log-ratio expected of a cell, without the common factor of the moment."""
        if not cell.rounds:
            return self._expected(cell)
        trust = cell.rounds / (cell.rounds + (self._noise / self._spread) ** 2)
        return trust * cell.mean + (1.0 - trust) * self._expected(cell)

    def deviation(self, cell: Cell) -> float:
        """Return the standard deviation of what `correction` expects."""
        if not cell.rounds:
            return self._spread * (0.7 if cell.has_siblings else 1.0)
        return self._noise / math.sqrt(cell.rounds) + 0.005

    def most_deviation(self) -> float:
        """Return the most that `deviation` says of any cell."""
        return max(self._spread, self._noise + 0.005)

    def off_tax(self) -> float:
        """Return by what share plain rounds take longer than expected, relative to rounds with
        drafts; 0 until both were seen."""
        plain = self._group.get(PLAIN)
        others = [
            self._group[key][0]
            for key in self._group
            if isinstance(key, Candidate) and key != PLAIN
        ]
        if plain is None or not others:
            return 0.0
        return math.exp(plain[0] - math.fsum(others) / len(others)) - 1.0

    def _cells_known(self) -> bool:
        return self._is_scaled or None in self._group

    def _expected(self, cell: Cell) -> float:
        """Return the log-ratio of a cell that has not run, from those that have."""
        return self._usual(cell.candidate) + self._regions.get(cell.region, 0.0)

    def _usual(self, candidate: Candidate) -> float:
        """Return the log-ratio of a candidate where nothing is known of the region."""
        group = self._group
        mean = group.get(None, (0.0, 0.0))[0]
        for key, prior in ((candidate.draft_loops, 2.0), (candidate, 1.0)):
            found = group.get(key)
            if found is not None:
                part = found[1] / (found[1] + prior)
                mean += part * (found[0] - mean)
        return mean

    def _regroup(self) -> None:
        """Compute what all cells, each depth, each candidate and each region have in common."""
        known: dict[Candidate, list[Cell]] = {}
        for candidate, cells in self._by_candidate.items():
            found = [cell for cell in cells if cell.rounds]
            for cell in cells:
                cell.has_siblings = bool(found)
            if found:
                known[candidate] = found
        self._regions = {}
        self._fit_candidates(known)
        if len({cell.region for found in known.values() for cell in found}) > 1:
            # Candidates and regions share out what cells have, so neither can be had at once.
            for _ in range(FITS):
                self._fit_regions(known)
                self._fit_candidates(known)
        if None in self._group:
            mean = self._group[None][0]
            regions = self._regions
            squares = [
                (cell.mean - mean - regions.get(cell.region, 0.0)) ** 2
                for found in known.values()
                for cell in found
            ]
            prior = 3.0
            # One mean was fitted, which costs one degree of freedom.
            count = max(0, len(squares) - 1)
            self._spread = math.sqrt(
                (prior * self._deviation**2 + math.fsum(squares)) / (prior + count)
            )
        self.version += 1

    def _fit_candidates(self, known: Mapping[Candidate, list[Cell]]) -> None:
        """Compute the means of all cells, of each depth, and of each candidate, without what is
        their regions'."""
        sums: dict[Any, list[float]] = {}
        regions = self._regions
        for candidate, cells in known.items():
            total = math.fsum([cell.mean - regions.get(cell.region, 0.0) for cell in cells])
            sums[candidate] = [total, float(len(cells))]
            for key in (None, candidate.draft_loops):
                entry = sums.setdefault(key, [0.0, 0.0])
                entry[0] += total / len(cells)
                entry[1] += 1.0
        self._group = {key: (total / count, count) for key, (total, count) in sums.items()}

    def _fit_regions(self, known: Mapping[Candidate, list[Cell]]) -> None:
        """Compute what the cells of each region have in common beside their candidates."""
        sums: dict[tuple[int, int], list[float]] = {}
        for candidate, cells in known.items():
            usual = self._usual(candidate)
            for cell in cells:
                entry = sums.setdefault(cell.region, [0.0, REGION_PRIOR])
                entry[0] += cell.mean - usual
                entry[1] += 1.0
        self._regions = {region: total / count for region, (total, count) in sums.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return what was learnt as a JSON document."""
        self._regroup()  # so that going on from it and going on from here is the same
        return {
            "cells": {
                cell.key: [cell.mean, cell.rounds, cell.outliers] for cell in self._cells.values()
            },
            "common": self.common,
            "noise": self._noise,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._cells.clear()
        self._by_candidate.clear()
        for key, (mean, rounds, outliers) in state["cells"].items():
            size, context, k, d = map(int, key.split(","))
            cell = self.cell(size, context, Candidate(k, d))
            check_number("log-ratio of a cell", mean, -_FARTHEST, _FARTHEST)
            check_int("rounds of a cell", rounds, 0, _MOST_ROUNDS)
            check_int("outliers of a cell", outliers, 0, _MOST_ROUNDS)
            cell.mean, cell.rounds, cell.outliers = float(mean), rounds, outliers
        check_number("common log-ratio", state["common"], -_FARTHEST, _FARTHEST)
        check_number("noise of log-ratios", state["noise"], NOISE_FLOOR, _FARTHEST)
        self.common, self._noise = float(state["common"]), float(state["noise"])
        self._odd = None
        self._regroup()
