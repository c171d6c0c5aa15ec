"""Conditional trials, the estimates made of them, and the changes that they show."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looped_spec.control.acceptance import AcceptanceModel, count_trials
from looped_spec.control.change import BACK, DOWN, NONE, UP, ChangeDetector
from looped_spec.control.goodput_settings import GoodputSettings
from looped_spec.control.levels import DepthLevels

LONGEST = 4
REQUEST = st.integers(0, LONGEST).flatmap(lambda p: st.tuples(st.just(p), st.integers(0, p)))


def model(depths: int = 2, **settings: float) -> AcceptanceModel:
    """Return a model of `depths` draft depths that has seen nothing."""
    levels = DepthLevels([0.5 * number for number in range(depths)], 1.2, 0.5)
    longest = dict.fromkeys(range(1, depths + 1), LONGEST)
    return AcceptanceModel(longest, GoodputSettings(**settings), levels)


def drafts(chances: Sequence[float], requests: int, draw: random.Random) -> tuple[int, ...]:
    """Return how many drafts each of some requests keeps; `chances` is per position."""
    found = []
    for _ in range(requests):
        kept = 0
        while kept < len(chances) and draw.random() < chances[kept]:
            kept += 1
        found.append(kept)
    return tuple(found)


def feed(
    target: AcceptanceModel, depth: int, chances: Sequence[float], rounds: int, draw: random.Random
) -> list[int]:
    """Let a depth run for some rounds of 8 requests; return what each round showed."""
    shown = []
    for _ in range(rounds):
        kept = drafts(chances, 8, draw)
        counted = count_trials((len(chances),) * 8, kept, LONGEST)
        assert counted is not None
        shown.append(target.record(depth, *counted))
    target.couple()
    return shown


@given(st.lists(REQUEST, max_size=12))
def test_trials_are_those_of_counting_each_position_of_each_request(
    requests: list[tuple[int, int]],
) -> None:
    counts, hits = [0] * LONGEST, [0] * LONGEST
    for proposed, accepted in requests:
        for position in range(LONGEST):
            if position < proposed and position <= accepted:
                counts[position] += 1
                hits[position] += position < accepted
    while counts and not counts[-1]:
        counts.pop()
        hits.pop()
    found = count_trials([p for p, _ in requests], [a for _, a in requests], LONGEST)
    assert found == (counts, hits)


@pytest.mark.parametrize(
    ("proposed", "accepted"),
    [((2,), (3,)), ((2, 2), (1,)), ((5,), (1,)), ((4, 4), (4, -1)), ((4,), (5,)), ((1,), (-1,))],
)
def test_numbers_that_contradict_themselves_are_refused(
    proposed: tuple[int, ...], accepted: tuple[int, ...]
) -> None:
    assert count_trials(proposed, accepted, LONGEST) is None


def test_estimates_come_to_what_the_workload_accepts() -> None:
    target, draw = model(), random.Random(1)
    chances = (0.8, 0.7, 0.6, 0.5)
    feed(target, 0, chances, 200, draw)
    assert target.chances(0) == pytest.approx(chances, abs=0.1)
    survival = [0.8, 0.56, 0.336, 0.168]
    assert target.tokens[0][3] == pytest.approx(1 + sum(survival[:3]), abs=0.25)


def test_another_depth_moves_with_the_one_that_runs() -> None:
    target, draw = model(), random.Random(2)
    before = target.chances(1)[0]
    feed(target, 0, (0.05,), 20, draw)
    after = target.chances(1)[0]
    assert after < before - 0.2
    assert after > target.chances(0)[0], "the deeper one stays the better one"


def test_shadow_trials_are_evidence_of_their_depth() -> None:
    target, draw = model(), random.Random(3)
    feed(target, 0, (0.3,), 20, draw)
    for _ in range(40):
        counted = count_trials((1,) * 8, drafts((0.9,), 8, draw), LONGEST)
        assert counted is not None
        target.shadow(1, *counted)
    target.couple()
    assert target.chances(1)[0] == pytest.approx(0.9, abs=0.07)
    assert target.chances(0)[0] == pytest.approx(0.3, abs=0.12)


@pytest.mark.parametrize(("first", "then", "wanted"), [(0.9, 0.2, DOWN), (0.2, 0.9, UP)])
def test_a_change_is_found_and_old_evidence_dropped(first: float, then: float, wanted: int) -> None:
    target, draw = model(), random.Random(4)
    feed(target, 0, (first,), 20, draw)  # the first of them may well look like a change
    assert set(feed(target, 0, (first,), 80, draw)) == {NONE}
    shown = feed(target, 0, (then,), 4, draw)
    assert wanted in shown
    assert target.chances(0)[0] == pytest.approx(then, abs=0.2)


def test_a_steady_workload_raises_an_alarm_in_some_hundred_rounds_at_most() -> None:
    target, draw = model(), random.Random(5)
    shown = feed(target, 0, (0.7, 0.7, 0.7), 2000, draw)
    assert sum(map(abs, shown)) <= 6


def test_one_round_alone_is_no_change() -> None:
    detector = ChangeDetector(2.0, 8.0)
    assert detector.step(-100.0, 1.0) == NONE
    assert detector.step(-100.0, 1.0) == DOWN


def test_expected_rounds_leave_no_evidence_of_a_change() -> None:
    detector = ChangeDetector(2.0, 8.0)
    detector.step(3.0, 1.0)
    assert detector.is_rising
    for _ in range(10):
        detector.step(0.0, 1.0)
    assert not detector.is_rising
    assert detector.up_rounds == 0


def test_what_was_saved_continues_as_before() -> None:
    target, draw = model(), random.Random(6)
    feed(target, 0, (0.8, 0.7), 30, draw)
    feed(target, 1, (0.9,), 5, draw)
    copy = model()
    copy.load_state_dict(target.state_dict())
    for one in (target, copy):
        feed(one, 0, (0.3, 0.3), 10, random.Random(7))
    for ours, theirs in zip(copy.tokens, target.tokens, strict=True):
        assert ours == pytest.approx(theirs)


def believe(target: AcceptanceModel, depth: int, chances: Sequence[float]) -> random.Random:
    """Let a depth run until its estimates are near `chances`."""
    draw = random.Random(1)
    feed(target, depth, chances, 60, draw)
    return draw


def bad_luck(target: AcceptanceModel, depth: int) -> None:
    """Let single requests fail until that passes for a change."""
    for _ in range(40):
        if target.record(depth, [1], [0]) == DOWN:
            return
    raise AssertionError("no change was found")


def test_a_change_that_the_next_trials_contradict_is_taken_back() -> None:
    target = model()
    draw = believe(target, 1, [0.9] * LONGEST)
    before = [list(row) for row in target.tokens]
    bad_luck(target, 1)
    assert target.tokens[1][LONGEST] < 0.7 * before[1][LONGEST]
    assert target.unproven == 1
    shown = feed(target, 1, [0.9] * LONGEST, 4, draw)
    assert BACK in shown
    assert target.unproven == -1
    for depth in range(2):
        assert target.tokens[depth] == pytest.approx(before[depth], rel=0.1)


def test_a_change_that_is_borne_out_stands() -> None:
    target = model()
    draw = believe(target, 1, [0.9] * LONGEST)
    bad_luck(target, 1)
    shown = feed(target, 1, [0.2] * LONGEST, 14, draw)
    assert BACK not in shown
    assert target.unproven == -1  # Nobody asks any more.
    assert target.tokens[1][1] == pytest.approx(1.2, abs=0.1)


def test_estimates_are_brought_up_to_date_during_a_review_too() -> None:
    target = model()
    believe(target, 1, [0.9] * LONGEST)
    bad_luck(target, 1)
    before = target.chances(1)[1]
    assert target.record(1, [8, 3], [3, 3]) == NONE
    assert target.unproven == 1
    target.update()
    assert target.chances(1)[1] > before


def test_a_state_that_is_saved_during_a_review_goes_on_without_it() -> None:
    target = model()
    believe(target, 1, [0.9] * LONGEST)
    bad_luck(target, 1)
    again = model()
    again.load_state_dict(target.state_dict())
    assert again.unproven == -1
    assert again.tokens == target.tokens
