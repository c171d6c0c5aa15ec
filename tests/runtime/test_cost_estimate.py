"""Costs estimated from a model's sizes: no more than a prior, with the order of things right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toys import shared_toy

from looped_spec import AdaptiveSpecConfig
from looped_spec.control.cost import CostTable
from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.runtime.cost_estimate import NOT_MEASURED, StageSizes, with_estimated_cost

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CONFIG = AdaptiveSpecConfig.default(4, 24)


def estimate(device: torch.device = CPU, **changes: Any) -> CostTable:
    config = with_estimated_cost(CONFIG, shared_toy(**changes), torch.float32, device)
    assert config.cost is not None
    assert 0 < config.shadow_cost_ratio < 5
    return config.cost


def ms(table: CostTable, candidate: Candidate, batch_size: int = 1, context: int = 0) -> float:
    found = table.ms(batch_size, context, candidate)
    assert found is not None
    return found


def test_every_candidate_at_every_batch_size_has_a_cost_that_says_it_was_not_measured() -> None:
    table = estimate()
    assert table.mismatch == NOT_MEASURED
    assert set(table.candidates) == set(CONFIG.candidates) | {PLAIN}
    assert {cell.batch_size for cell in table.cells} == {1, 2, 4, 8, 16, 24}


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_more_drafts_more_loops_more_requests_and_more_context_cost_more(
    device: torch.device,
) -> None:
    table = estimate(device)
    for few, many in (
        (PLAIN, Candidate(1, 1)),
        (Candidate(1, 1), Candidate(2, 1)),
        (Candidate(2, 1), Candidate(2, 2)),
    ):
        assert ms(table, few) < ms(table, many)
        assert ms(table, few) < ms(table, few, batch_size=24)
        assert ms(table, few) < ms(table, few, context=100)
    # Rows of a wide batch are not free.
    narrow = ms(table, Candidate(4, 1)) / ms(table, PLAIN)
    wide = ms(table, Candidate(4, 1), 24) / ms(table, PLAIN, 24)
    assert wide >= narrow


def test_a_model_verified_from_its_prelude_pays_its_drafts_twice() -> None:
    again, resumed = estimate(depth_conditioned=True), estimate()
    assert ms(again, PLAIN) == ms(resumed, PLAIN)
    assert ms(again, Candidate(2, 2)) > ms(resumed, Candidate(2, 2))


def test_a_cost_table_that_is_there_is_kept() -> None:
    given = CostTable.of({(1, 0, 0, 0): 5.0})
    config = AdaptiveSpecConfig.default(4, 24, cost=given)
    assert with_estimated_cost(config, shared_toy(), torch.float32, CPU) is config


def test_sizes_come_from_planes_and_parameters() -> None:
    sizes = StageSizes.of(shared_toy())
    assert (sizes.prelude_layers, sizes.loop_layers, sizes.readout_layers) == (1, 2, 1)
    assert sizes.cache_numbers == 2 * 2 * 2 * 8
    total = sum(p.numel() for p in shared_toy().module.parameters())
    assert 0 < sizes.layer_parameters * 4 < total
