"""What is learnt from round times, and what is not."""

from __future__ import annotations

import math
import random

import pytest

from looped_spec.control.cost_correction import MAX_OUTLIERS, Cell, CostCorrection
from looped_spec.control.plan import PLAIN, Candidate

DRAFTS = [Candidate(k, d) for d in (1, 2) for k in (1, 2, 4)]


def correction(is_scaled: bool = True) -> tuple[CostCorrection, dict[Candidate, Cell]]:
    """Return a correction and its cells at one size."""
    learnt = CostCorrection(0.1, is_scaled)
    return learnt, {candidate: learnt.cell(1, 1, candidate) for candidate in [PLAIN, *DRAFTS]}


def gap(learnt: CostCorrection, one: Cell, other: Cell) -> float:
    """Return by how much the first is held to be dearer than the second, as a log-ratio."""
    return learnt.correction(one) - learnt.correction(other)


def test_a_cell_learns_its_own_error_and_others_what_is_common() -> None:
    learnt, cells = correction()
    draw = random.Random(0)
    for _ in range(30):
        learnt.learn(cells[DRAFTS[0]], 0.3 + draw.gauss(0, 0.03))
        learnt.learn(cells[DRAFTS[1]], 0.1 + draw.gauss(0, 0.03))
    assert gap(learnt, cells[DRAFTS[0]], cells[DRAFTS[1]]) == pytest.approx(0.2, abs=0.03)
    unseen = learnt.correction(cells[Candidate(4, 1)])
    assert learnt.correction(cells[DRAFTS[1]]) < unseen < learnt.correction(cells[DRAFTS[0]])


def test_a_depth_that_is_off_as_a_whole_is_expected_to_be_off_elsewhere() -> None:
    learnt, cells = correction()
    for candidate, ratio in (
        (DRAFTS[0], 0.0),
        (DRAFTS[1], 0.0),
        (DRAFTS[3], 0.4),
        (DRAFTS[4], 0.4),
    ):
        for _ in range(8):
            learnt.learn(cells[candidate], ratio)
    unseen_deep, unseen_shallow = cells[Candidate(4, 2)], cells[Candidate(4, 1)]
    assert gap(learnt, unseen_deep, unseen_shallow) > 0.15


@pytest.mark.parametrize("is_scaled", [True, False])
def test_a_few_slow_first_rounds_punish_no_candidate(is_scaled: bool) -> None:
    learnt, cells = correction(is_scaled)
    one, other = cells[DRAFTS[0]], cells[DRAFTS[1]]
    for cell in (one, other):
        for _ in range(3):
            learnt.learn(cell, math.log(20.0))
        for _ in range(6):
            learnt.learn(cell, 0.0)
    assert gap(learnt, one, other) == pytest.approx(0.0, abs=0.05)
    assert learnt.correction(one) == pytest.approx(0.0, abs=0.1)


@pytest.mark.parametrize("factor", [1.5, 5.0])
def test_what_stays_slow_is_believed(factor: float) -> None:
    learnt, cells = correction()
    for cell in cells.values():
        for _ in range(8):
            learnt.learn(cell, 0.0)
    slow, usual = cells[DRAFTS[0]], cells[DRAFTS[1]]
    for _ in range(MAX_OUTLIERS):
        assert not learnt.learn(slow, math.log(factor))
    for _ in range(8):
        learnt.learn(slow, math.log(factor))
        learnt.learn(usual, 0.0)
    assert gap(learnt, slow, usual) == pytest.approx(math.log(factor), abs=0.2)


def test_a_slow_down_of_everything_moves_no_candidate() -> None:
    learnt, cells = correction()
    draw = random.Random(1)
    one, other = cells[DRAFTS[0]], cells[DRAFTS[1]]
    for _ in range(40):
        for cell in (one, other):
            learnt.learn(cell, draw.gauss(0, 0.02))
    for number in range(50):
        learnt.learn(other if number % 10 == 5 else one, math.log(2.0) + draw.gauss(0, 0.02))
    assert learnt.common == pytest.approx(math.log(2.0), abs=0.05)
    assert gap(learnt, one, other) == pytest.approx(0.0, abs=0.03)


def test_a_single_freak_round_is_nobodys() -> None:
    learnt, cells = correction()
    draw = random.Random(2)
    one, other = cells[DRAFTS[0]], cells[DRAFTS[1]]
    for _ in range(40):
        for cell in (one, other):
            learnt.learn(cell, draw.gauss(0, 0.01))
    learnt.learn(one, -0.4)
    learnt.learn(other, 0.0)
    assert gap(learnt, one, other) == pytest.approx(0.0, abs=0.02)


def test_a_cell_never_run_is_less_certain_and_a_good_table_makes_it_surer() -> None:
    learnt, cells = correction()
    start = learnt.deviation(cells[Candidate(4, 2)])
    for candidate in DRAFTS[:5]:
        for _ in range(20):
            learnt.learn(cells[candidate], 0.0)
    assert learnt.deviation(cells[Candidate(4, 2)]) < 0.8 * start
    assert learnt.deviation(cells[DRAFTS[0]]) < 0.3 * learnt.deviation(cells[Candidate(4, 2)])


def test_plain_rounds_that_take_longer_than_told_are_a_tax() -> None:
    learnt, cells = correction()
    assert learnt.off_tax() == 0.0
    for candidate, ratio in ((PLAIN, math.log(1.2)), (DRAFTS[0], 0.0), (DRAFTS[3], 0.0)):
        for _ in range(4):
            learnt.learn(cells[candidate], ratio)
    assert learnt.off_tax() == pytest.approx(0.2)


def test_what_was_saved_gives_the_same_corrections() -> None:
    learnt, cells = correction()
    draw = random.Random(3)
    for _ in range(100):
        learnt.learn(cells[draw.choice(DRAFTS)], draw.gauss(0.1, 0.05))
    copy = CostCorrection(0.1, True)
    copy.load_state_dict(learnt.state_dict())
    for candidate, cell in cells.items():
        assert copy.correction(copy.cell(1, 1, candidate)) == pytest.approx(learnt.correction(cell))


def test_a_first_round_that_is_dearer_than_those_behind_it_teaches_nothing() -> None:
    learnt, cells = correction()
    run_often, run_once, never_run = (cells[candidate] for candidate in DRAFTS[:3])
    learnt.learn(run_once, 0.55)
    for _ in range(8):
        learnt.learn(run_often, 0.0)
    assert gap(learnt, run_once, run_often) == pytest.approx(0.0, abs=0.01)
    assert gap(learnt, never_run, run_often) == pytest.approx(0.0, abs=0.01)
    for _ in range(4):
        learnt.learn(run_once, 0.55)
    assert gap(learnt, run_once, run_often) > 0.45  # It was no freak of the first round.


def test_a_first_round_that_is_cheaper_than_expected_counts_at_once() -> None:
    learnt, cells = correction()
    for _ in range(8):
        learnt.learn(cells[DRAFTS[0]], 0.0)
    learnt.learn(cells[DRAFTS[1]], -0.3)
    assert gap(learnt, cells[DRAFTS[1]], cells[DRAFTS[0]]) < -0.15


def test_a_region_that_is_off_as_a_whole_is_expected_to_be_off_for_what_did_not_run_there() -> None:
    """Else whatever was not tried there yet looks cheap beside what was, and is switched to."""
    learnt, cells = correction()
    elsewhere = {candidate: learnt.cell(5, 1, candidate) for candidate in [PLAIN, *DRAFTS]}
    draw = random.Random(2)
    for _ in range(6):
        for candidate in DRAFTS[:4]:
            learnt.learn(cells[candidate], draw.gauss(0, 0.02))
    for _ in range(6):
        learnt.learn(elsewhere[DRAFTS[0]], 0.5 + draw.gauss(0, 0.02))
    tried, untried = elsewhere[DRAFTS[0]], elsewhere[DRAFTS[1]]
    assert learnt.correction(tried) == pytest.approx(0.5, abs=0.05)
    assert 0.2 < learnt.correction(untried) - learnt.correction(cells[DRAFTS[1]]) < 0.5
    learnt.learn(elsewhere[DRAFTS[2]], 0.5)
    assert learnt.correction(untried) - learnt.correction(cells[DRAFTS[1]]) > 0.3


def test_a_candidate_that_is_off_everywhere_makes_no_region_so() -> None:
    learnt, cells = correction()
    elsewhere = {candidate: learnt.cell(5, 1, candidate) for candidate in [PLAIN, *DRAFTS]}
    for candidate in DRAFTS:
        learnt.learn(cells[candidate], 0.4 if candidate == DRAFTS[0] else 0.0)
    learnt.learn(elsewhere[DRAFTS[0]], 0.4)
    assert abs(learnt.correction(elsewhere[DRAFTS[1]])) < 0.15


def test_cells_of_a_saved_state_are_no_siblings_of_what_was_known_before() -> None:
    learnt, cells = correction()
    fresh = learnt.deviation(cells[DRAFTS[0]])
    state = learnt.state_dict()
    learnt.learn(cells[DRAFTS[0]], 0.1)
    learnt.load_state_dict(state)
    assert learnt.deviation(learnt.cell(5, 1, DRAFTS[0])) == fresh
