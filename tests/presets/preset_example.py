"""A small valid preset, with whatever a test wants to be different."""

import dataclasses
from typing import Any

from looped_spec.control.config import AdaptiveSpecConfig, BatchBucket
from looped_spec.control.cost import CostTable
from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.presets import AcceptanceEntry, Preset, Provenance, WorkloadRecord

ARMS = (PLAIN, Candidate(1, 1), Candidate(2, 2), Candidate(4, 2))


def make_preset(**changes: Any) -> Preset:
    """Return a valid preset of a model of 4 loops for up to 8 requests."""
    cost = CostTable.of(
        {
            (b, length, c.num_speculative_tokens, c.draft_loops): 4.0
            + b
            + length / 128
            + c.num_speculative_tokens * c.draft_loops
            for b in (1, 8)
            for length in (0, 512)
            for c in ARMS
        }
    )
    measured = Provenance(
        "measured",
        "2026-11-30",
        command="looped-spec preset generate demo:toy",
        versions={"looped-spec": "0.1.0", "torch": "2.13.0"},
        device="Toy CPU",
        workloads={"maths": WorkloadRecord(12, "selection", "0" * 64)},
    )
    preset = Preset(
        model="demo:toy",
        adapter="toy",
        device_name="Toy CPU",
        dtype="float32",
        full_loops=4,
        config=AdaptiveSpecConfig(4, (BatchBucket(1, 2, ARMS, 2), BatchBucket(3, 8, ARMS[:3], 1))),
        cost=cost,
        acceptance=(
            AcceptanceEntry("maths", "selection", 1, (60, 40), (100, 60)),
            AcceptanceEntry("maths", "selection", 2, (90, 72, 54), (100, 90, 72)),
            AcceptanceEntry("maths", "evaluation", 2, (45, 36), (50, 45)),
        ),
        provenance={part: measured for part in ("config", "cost", "acceptance")},
    )
    return dataclasses.replace(preset, **changes)
