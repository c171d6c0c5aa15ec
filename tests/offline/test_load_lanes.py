"""Loads that run beside each other by turns: the same texts, and each with only its own time."""

from __future__ import annotations

from typing import Any

import pytest

from looped_spec.control.plan import Candidate
from looped_spec.control.static import StaticPolicy
from looped_spec.offline.load import Profile
from looped_spec.offline.load_lanes import OwnClock, drive_together
from looped_spec.offline.load_run import drive
from looped_spec.runtime.engine import Engine
from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.engine import make_engine
from looped_spec.testing.toy import make_toy

PARAMS = SamplingParams(temperature=0.0, max_tokens=6)
LOAD = Profile.parse("ramp:1-3-1", 2)
PROMPTS = [[1 + i, 2] for i in range(LOAD.num_requests)]


class Time:
    """A clock whose time only steps of engines take: so many seconds each."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def slow(self, engine: Engine, seconds: float) -> Engine:
        """Let each step of an engine take so long."""
        step = engine.step

        def timed() -> Any:
            self.now += seconds
            return step()

        engine.step = timed  # type: ignore[method-assign,assignment]
        return engine


def engines(time: Time) -> list[Engine]:
    """Return three that take 1, 3 and 1 seconds a step; the last one drafts."""
    made = [time.slow(make_engine(make_toy(), max_num_seqs=4), seconds) for seconds in (1, 3, 1)]
    made[2].policy = StaticPolicy(Candidate(2, 1))
    return made


@pytest.mark.parametrize("turn", [0.5, 2.0, 7.0, 1e6])
def test_each_has_the_time_and_the_text_that_it_has_alone(turn: float) -> None:
    time = Time()
    together = drive_together(engines(time), LOAD, PROMPTS, PARAMS, turn, clock=time)
    for engine, run in zip(engines(time), together, strict=True):
        alone = drive(engine, LOAD, PROMPTS, PARAMS, clock=time)
        assert run.token_ids == alone.token_ids
        assert run.seconds == pytest.approx(alone.seconds)
        assert run.phase_seconds == pytest.approx(alone.phase_seconds)
        assert [one.gaps for one in run.served] == [one.gaps for one in alone.served]


def test_turns_are_as_long_as_they_should_be_and_whoever_is_behind_is_next() -> None:
    time, order = Time(), []
    made = engines(time)[:2]
    for name, engine in zip("ab", made, strict=True):
        step = engine.step

        def noted(step: Any = step, name: str = name) -> Any:
            order.append(name)
            return step()

        engine.step = noted  # type: ignore[method-assign,assignment]
    drive_together(made, LOAD, PROMPTS, PARAMS, 4.0, clock=time)
    # A turn is 4 steps of 1 second or 2 of 3, and each of these gives a token.
    assert "".join(order).startswith("aaaabbbbaaaabbbb")


def test_all_are_at_the_same_place_of_the_load_at_any_time() -> None:
    """Else the dearest phase of one may meet a slow machine, and that of another a fast one."""
    time, order = Time(), []
    lanes = engines(time)
    for place, engine in enumerate(lanes):
        step = engine.step

        def noted(step: Any = step, place: int = place) -> Any:
            order.append(place)
            return step()

        engine.step = noted  # type: ignore[method-assign,assignment]
    drive_together(lanes, LOAD, PROMPTS, PARAMS, 3.0, clock=time)
    ends = [max(i for i, place in enumerate(order) if place == lane) for lane in range(3)]
    assert max(ends) - min(ends) <= 12 < len(order) // 3
    assert order.count(2) < order.count(0) == order.count(1)


def test_a_failure_in_one_leaves_all_of_them_empty() -> None:
    time, steps = Time(), []
    made = engines(time)
    step = made[1].step

    def interrupted() -> Any:
        steps.append(1)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return step()

    made[1].step = interrupted  # type: ignore[method-assign,assignment]
    with pytest.raises(KeyboardInterrupt):
        drive_together(made, LOAD, PROMPTS, PARAMS, 2.0, clock=time)
    for engine in made:
        assert not engine.has_work
        assert engine.scheduler.allocator.num_free == engine.scheduler.allocator.num_blocks


def test_a_clock_of_ones_own_stands_still_between_turns() -> None:
    time = Time()
    own = OwnClock(time)
    for now, turn in ((5.0, 2.0), (100.0, 0.5)):
        time.now = now
        own.resume()
        time.now += turn
        own.pause()
    time.now = 1000.0
    assert own() == 2.5
