"""A plan and a measurer without a model: times by the ideal formula, acceptance as given."""

from __future__ import annotations

import dataclasses
from typing import Any

from looped_spec.control.cost import analytic_ms
from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.offline.cells import AcceptanceRun, Cell, CostBlock
from looped_spec.offline.estimates import CellTimes
from looped_spec.offline.plan import SamplingPlan
from looped_spec.offline.settings import SamplingSettings

FULL_LOOPS = 4
SETTINGS = SamplingSettings(
    batch_sizes=(1, 8),
    context_lengths=(32, 64),
    ks=(1, 2, 4),
    ds=(1, 2),
    repeats=2,
    prompts=16,
    confirm_repeats=2,
    finalists=2,
)


def make_plan(**changes: Any) -> SamplingPlan:
    """A plan of a model that is not there; `changes` are of its settings."""
    origin = {"items": 16, "group": "selection", "sha256": "0" * 64, "file": "f.jsonl"}
    return SamplingPlan(
        model="demo:fake",
        revision=None,
        adapter="fake",
        adapter_options={},
        full_loops=FULL_LOOPS,
        device_name="a device",
        dtype="float32",
        reads_shadows=True,
        settings=dataclasses.replace(SETTINGS, **changes),
        workloads={"easy": origin, "hard": origin},
        versions={"num_threads": "1", "torch": "2"},
    )


def make_times(plan: SamplingPlan) -> CellTimes:
    """Guesses of a model whose plain round takes 10 ms."""
    return CellTimes(plan, {1: 0.01}, 0.0)


def header_of(plan: SamplingPlan) -> dict[str, Any]:
    """What a file of samples begins with."""
    header = {"command": "looped-spec preset generate", "note": "", "started": "2026-01-02T03:04"}
    return {"plan": plan.to_json(), **header}


@dataclasses.dataclass
class FakeMeasurer:
    """Measures cells without a model.

    Attributes:
        plan: what is measured.
        chances: of each draft, by workload and depth.
        row_cost: by how much more rows make a pass slower.
        echoes: of 8 texts of each workload, how many repeat themselves.
        readout_loops: what a readout of another depth takes, in loop passes; None: not measured.
        measured: keys of the cells in the order in which they were measured.
    """

    plan: SamplingPlan
    chances: dict[tuple[str, int], float]
    row_cost: float = 0.02
    echoes: dict[str, int] = dataclasses.field(default_factory=dict)
    readout_loops: float | None = None
    measured: list[str] = dataclasses.field(default_factory=list)

    def ms(self, size: int, candidate: Candidate) -> float:
        return analytic_ms(FULL_LOOPS, candidate, rows=size, row_cost=self.row_cost)

    def measure(self, cell: Cell) -> dict[str, Any]:
        self.measured.append(cell.key)
        if isinstance(cell, CostBlock):
            slow = 1.0 + cell.repeat  # a machine that is slower in one block than in another
            arms = [PLAIN, *self.plan.candidates(cell.batch_size)]
            rows = [
                [c.num_speculative_tokens, c.draft_loops, slow * self.ms(cell.batch_size, c), 1.0]
                for c in arms
            ]
            data = {"ms": rows, "again_ms": 1.02 * rows[0][2], "host_ms": 0.0}
            if self.readout_loops is not None:
                # Plain decoding counts as the mean of its two times.
                plain = 1.01 * rows[0][2]
                each = self.readout_loops * plain / FULL_LOOPS
                drafted = dict(zip(arms, rows, strict=True))[Candidate(2, 2)][2]
                data["shadow_ms"] = [[0, 0, 2, plain + 2 * each], [2, 2, 1, drafted + each]]
            return data
        if isinstance(cell, AcceptanceRun):
            counts = []
            for depth in (1, 2):
                trials, accepted, alive = [], [], 1000
                for _ in range(4):
                    trials.append(alive)
                    alive = round(alive * self.chances[cell.workload, depth])
                    accepted.append(alive)
                counts.append([depth, trials, accepted])
            echoes = self.echoes.get(cell.workload, 0)
            return {
                "counts": counts,
                "echo_counts": [],
                "texts": 8,
                "echoes": echoes,
                "tokens": 512,
            }
        runs = []
        for candidate in (PLAIN, *cell.candidates, PLAIN):
            chance = self.chances["easy", candidate.draft_loops or 1]
            per_round = sum(chance**k for k in range(candidate.num_speculative_tokens + 1))
            seconds = self.ms(cell.batch_size, candidate) / 1000
            runs.append(
                [
                    candidate.num_speculative_tokens,
                    candidate.draft_loops,
                    round(1000 * cell.batch_size * per_round),
                    1000 * seconds,
                    1000,
                ]
            )
        return {"runs": runs}


GOOD = {("easy", 1): 0.9, ("easy", 2): 0.95, ("hard", 1): 0.6, ("hard", 2): 0.8}
BAD = dict.fromkeys(GOOD, 0.05)
