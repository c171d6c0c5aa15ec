"""Runs a load on several engines beside each other, by turns of some milliseconds.

A machine that is shared, or gets hot, changes its speed within seconds. Ways of decoding that run
one after the other then differ by what happened to happen meanwhile; here all of them go through
it together, and each one's time is only that of its own turns. It is always the turn of the one
that has the fewest tokens, so that all are at about the same place of the load at any time.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from looped_spec.offline.load import Profile
from looped_spec.offline.load_run import Clock, LoadRun, paced
from looped_spec.runtime.engine import Engine
from looped_spec.sampling_params import SamplingParams


class OwnClock:
    """Seconds of the turns of one lane; it stands still between them.

    Args:
        clock: seconds of the world.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept = 0.0
        self._since: float | None = None

    def __call__(self) -> float:
        """Return the seconds of all turns so far."""
        return self._kept + (0.0 if self._since is None else self._clock() - self._since)

    def resume(self) -> None:
        """Begin a turn."""
        self._since = self._clock()

    def pause(self) -> None:
        """End it."""
        self._kept = self()
        self._since = None


@dataclass
class _Lane:
    clock: OwnClock
    steps: Generator[int | LoadRun]
    num_tokens: int = 0
    run: LoadRun | None = None

    def turn(self, seconds: float) -> None:
        """Run steps for so long, at least one; the last step of the load gives its `run`."""
        clock = self.clock
        clock.resume()
        end = clock() + seconds
        while self.run is None:
            got = next(self.steps)
            if isinstance(got, LoadRun):
                self.run = got
            else:
                self.num_tokens = got
                if clock() >= end:
                    break
        clock.pause()


def drive_together(
    engines: Sequence[Engine],
    profile: Profile,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    turn_seconds: float,
    *,
    clock: Clock = time.perf_counter,
) -> list[LoadRun]:
    """Run the same load on several engines, as `drive` does on one, by turns of `turn_seconds`.

    A turn ends with the step that reaches its length. Engines must be different ones, and must not
    leave a round in the air between two steps (`async_scheduling`), whose time would be that of
    the others too. Weights may be shared. What is unfinished is dropped from all of them if
    anything fails, Ctrl-C included.
    """
    lanes = []
    for engine in engines:
        own = OwnClock(clock)
        lanes.append(_Lane(own, paced(engine, profile, prompts, params, clock=own)))
    try:
        while waiting := [lane for lane in lanes if lane.run is None]:
            min(waiting, key=lambda lane: lane.num_tokens).turn(turn_seconds)
    finally:
        for lane in lanes:
            lane.steps.close()
    return [lane.run for lane in lanes if lane.run is not None]
