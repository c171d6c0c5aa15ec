"""Cost tables, the ideal formula, and the thresholds that costs imply."""

from __future__ import annotations

import json

import pytest

from looped_spec.control.config import AdaptiveSpecConfig
from looped_spec.control.cost import CostTable, analytic_ms
from looped_spec.control.cost_model import CostModel
from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.control.thresholds import (
    ALWAYS,
    NEVER,
    break_even,
    draft_acceptance_rate,
    expected_tokens,
)
from looped_spec.errors import ConfigError

TABLE = CostTable.of(
    {
        (1, 512, 0, 0): 5.0,
        (1, 512, 1, 1): 6.0,
        (9, 512, 0, 0): 7.0,
        (9, 512, 1, 1): 10.0,
        (9, 2048, 0, 0): 9.0,
        (9, 2048, 1, 1): 12.0,
    }
)
ONE = Candidate(1, 1)

# control.md section 2: acceptance above which one draft more pays with ideal costs and D = 4, as
# the conditional acceptance of the last position, at d = 1, 2 and 3.
STEPS = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (7, 8)]
ALPHA = {
    1: [0.25, 0.558, 0.619, 0.664, 0.698, 0.726, 0.769],
    2: [0.50, 0.768, 0.812, 0.842, 0.864, 0.880, 0.903],
    3: [0.75, 0.903, 0.925, 0.939, 0.948, 0.955, 0.965],
}
CONDITIONAL = {
    1: [0.25, 0.558, 0.720, 0.808, 0.861, 0.895, 0.934],
    2: [0.50, 0.768, 0.869, 0.916, 0.942, 0.958, 0.975],
    3: [0.75, 0.903, 0.949, 0.969, 0.979, 0.985, 0.991],
}


def ideal(candidate: Candidate) -> float:
    """Return D + dK of a model of 4 loops."""
    return 4.0 + candidate.num_speculative_tokens * candidate.draft_loops


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("number", range(len(STEPS)))
def test_break_even_acceptance_is_that_of_the_specification(d: int, number: int) -> None:
    low_k, high_k = STEPS[number]
    low = Candidate(low_k, d) if low_k else PLAIN
    chance = break_even(low, Candidate(high_k, d), ideal)
    assert chance == pytest.approx(CONDITIONAL[d][number], abs=6e-4)
    if low_k:
        assert draft_acceptance_rate(chance, low_k) == pytest.approx(ALPHA[d][number], abs=6e-4)


def test_break_even_is_the_general_rule_of_the_specification() -> None:
    p = break_even(Candidate(3, 1), Candidate(4, 1), ideal)
    assert p**4 / expected_tokens(p, 3) == pytest.approx((8 - 7) / 7)


@pytest.mark.parametrize(("factor", "wanted"), [(0.5, ALWAYS), (3.0, NEVER)])
def test_what_always_or_never_pays_has_no_crossing(factor: float, wanted: float) -> None:
    costs = {PLAIN: 1.0, ONE: factor}
    assert break_even(PLAIN, ONE, costs.__getitem__) == wanted


def test_the_ideal_formula_gives_the_known_ratio_of_the_rfc() -> None:
    times = [analytic_ms(4, Candidate(1, d)) for d in (2, 3)]
    assert times == [6.0, 7.0]
    assert (1.949 / times[1]) / (1.908 / times[0]) == pytest.approx(0.88, abs=0.005)


def test_rows_readouts_and_overhead_are_added_to_the_formula() -> None:
    ms = analytic_ms(
        4, Candidate(2, 1), loop_ms=2.0, rows=8, row_cost=0.01, readout_ms=0.5, overhead_ms=0.25
    )
    narrow, wide = 2.0 * 1.08, 2.0 * 1.24
    assert ms == pytest.approx(3 * narrow + 3 * wide + 3 * 0.5 + 0.25)


@pytest.mark.parametrize(
    ("batch_size", "context", "ms"),
    [
        (1, 512, 6.0),
        (5, 512, 8.0),
        (9, 1024, 11.0),  # halfway in the logarithm of the context
        (9, 100, 10.0),
        (64, 9000, 12.0),
    ],
)
def test_times_are_interpolated_and_stay_at_the_edges(
    batch_size: int, context: int, ms: float
) -> None:
    assert TABLE.ms(batch_size, context, ONE) == pytest.approx(ms)


def test_a_table_survives_json() -> None:
    table = CostTable.of({(1, 0, 0, 0): 5.0}, {"device": "x", "model": "m"})
    read = CostTable.from_json(json.loads(json.dumps(table.to_json())))
    assert read == table
    assert read.fingerprint == (("device", "x"), ("model", "m"))


@pytest.mark.parametrize(
    ("cell", "named"),
    [
        ((0, 0, 1, 1), "batch_size"),
        ((1, -1, 1, 1), "context_tokens"),
        ((1, 0, 0, 1), "draft_loops"),
        ((1, 0, 1, 0), "draft_loops"),
    ],
)
def test_an_impossible_cell_is_refused_by_name(cell: tuple[int, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        CostTable.of({cell: 1.0})  # type: ignore[dict-item]


@pytest.mark.parametrize("ms", [0.0, -1.0, float("inf"), float("nan"), True])
def test_a_time_that_is_none_is_refused(ms: float) -> None:
    with pytest.raises(ConfigError, match="positive number"):
        CostTable.of({(1, 0, 0, 0): ms})


def test_a_candidate_that_the_table_lacks_costs_what_the_formula_says_beside_plain() -> None:
    config = AdaptiveSpecConfig.default(4, 9, cost=TABLE)
    model = CostModel(config)
    bare = CostModel(AdaptiveSpecConfig.default(4, 9))
    missing = Candidate(4, 2)
    ratio = bare.ms(9, 512, missing) / bare.ms(9, 512, PLAIN)
    assert model.ms(9, 512, missing) == pytest.approx(7.0 * ratio)
    assert model.ms(9, 512, ONE) == pytest.approx(10.0)
