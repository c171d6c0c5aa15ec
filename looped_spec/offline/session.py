"""One sampling run: cells in the order of their value, within a budget, each kept at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from looped_spec.errors import ConfigError
from looped_spec.offline.aggregate import aggregate
from looped_spec.offline.cells import Cell, cell_document
from looped_spec.offline.estimates import CellTimes
from looped_spec.offline.measurer import Measurer
from looped_spec.offline.plan import SamplingPlan
from looped_spec.offline.select import finalists
from looped_spec.offline.store import SampleStore

FIRST_SHARE = 0.7
"""Share of a budget for costs and acceptance; the rest is for the finalists."""

Clock = Callable[[], float]
"""Seconds that never run backwards, whatever happens to the time of day."""


class Workers(Protocol):
    """Measures cells, here or elsewhere."""

    @property
    def count(self) -> int:
        """How many cells are measured at a time."""
        ...

    def run(self, cells: Iterator[Cell]) -> Iterator[tuple[Cell, dict[str, Any], float]]:
        """Yield each cell with its data and the seconds that it took, in any order.

        `cells` is read no further than there are workers that are free.
        """
        ...


@dataclass(frozen=True)
class LocalWorker:
    """Measures cells one after the other in this process."""

    measurer: Measurer
    clock: Clock = time.monotonic
    count: int = 1

    def run(self, cells: Iterator[Cell]) -> Iterator[tuple[Cell, dict[str, Any], float]]:
        """Yield each cell with its data and its seconds."""
        for cell in cells:
            start = self.clock()
            data = self.measurer.measure(cell)
            yield cell, data, self.clock() - start


class Progress(Protocol):
    """Is told how a run goes on."""

    def begin(self, cell: Cell, seconds_left: float) -> None:
        """A cell is about to be measured."""
        ...

    def end(self, cell: Cell, done: int, left: int, seconds_left: float) -> None:
        """A cell was kept."""
        ...


@dataclass
class Session:
    """Runs a plan.

    Attributes:
        plan: what is measured.
        store: where it is kept; what it holds is not measured again.
        workers: who measures.
        times: how long cells take.
        budget: seconds from now on that may be used; None for as many as it takes.
        progress: who is told.
        clock: see `Clock`.
        left_out: cells that did not fit the budget, by name.
    """

    plan: SamplingPlan
    store: SampleStore
    workers: Workers
    times: CellTimes
    budget: float | None = None
    progress: Progress | None = None
    clock: Clock = time.monotonic
    left_out: list[str] = field(default_factory=list)
    num_measured: int = 0

    def run(self) -> None:
        """Measure what is missing: costs and acceptance, then the finalists on long texts.

        Raises `KeyboardInterrupt` through; every cell that ended is kept.
        """
        start = self.clock()
        first = self.plan.first_cells()
        last = start + self.budget if self.budget is not None else None
        soft = last
        if last is not None and self.budget is not None and self.plan.settings.confirm_repeats:
            soft = start + FIRST_SHARE * self.budget
        self._measure(first, soft)
        if not self.plan.settings.confirm_repeats:
            return
        try:
            measured = aggregate(self.store.cells, self.plan.full_loops)
            sizes = [
                size
                for size in self.plan.settings.batch_sizes
                if any(key[0] == size for key in measured.times)
            ]
            count = self.plan.settings.finalists
            found = {size: finalists(measured, size, count) for size in sizes}
        except ConfigError:
            if not self.left_out:
                raise
            return
        self._measure(list(self.plan.confirm_cells(found)), last)

    def _measure(self, cells: Sequence[Cell], deadline: float | None) -> None:
        missing = [cell for cell in cells if cell.key not in self.store.cells]
        waiting = list(missing)
        for cell, data, seconds in self.workers.run(self._admitted(missing, waiting, deadline)):
            self.store.add(cell.key, {"of": cell_document(cell), **data})
            self.num_measured += 1
            self.times.learn(cell, seconds)
            if self.progress is not None:
                self.progress.end(cell, self.num_measured, len(waiting), self._left(waiting))

    def _admitted(
        self, cells: Sequence[Cell], waiting: list[Cell], deadline: float | None
    ) -> Iterator[Cell]:
        """Yield the cells that are expected to end in time, taking each from `waiting`."""
        for cell in cells:
            waiting.remove(cell)
            if deadline is not None and self.clock() + self.times.seconds(cell) > deadline:
                self.left_out.append(cell.key)
                continue
            if self.progress is not None:
                self.progress.begin(cell, self._left([cell, *waiting]))
            yield cell

    def _left(self, cells: Iterable[Cell]) -> float:
        return self.times.total(cells) / self.workers.count
