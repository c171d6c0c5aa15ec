"""A round between its submission and its commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from looped_spec.control.plan import Candidate, SpeculationPlan
from looped_spec.runtime.policy import SpeculationPolicy
from looped_spec.runtime.prefiller import Interruption
from looped_spec.runtime.request import Request, Status
from looped_spec.runtime.round_result import RoundResult


@dataclass(slots=True)
class RoundInFlight:
    """What is run, for whom, and how to get what came of it.

    Attributes:
        policy: who planned it and wants to hear of it.
        plan: what was planned.
        candidate: what is run; shorter than planned where all requests are about to end.
        requests: who is in it.
        preemptions: how often each had been preempted when it was submitted; empty where nothing
            can come between that and its commit.
        is_whole: every request had memory for all drafts that it could have committed, so that the
            device does not get ahead of what can be committed.
        is_ahead: it was submitted before the round ahead of it had been read.
        started: when it began, in seconds of `time.perf_counter`.
        done: when the device was done, where that is known before the result is read.
        read: returns the result; waits for it if need be.
        interruption: what newcomers may do while it is read, None where it cannot stand still.
    """

    policy: SpeculationPolicy
    plan: SpeculationPlan
    candidate: Candidate
    requests: list[Request]
    preemptions: Sequence[int]
    is_whole: bool
    is_ahead: bool
    started: float
    done: float | None
    read: Callable[[], RoundResult]
    interruption: Interruption | None = None

    def live(self) -> list[int]:
        """Return the places of the requests that its result still concerns.

        One that ended or was aborted meanwhile, or gave up its memory and computes anew what it
        had, has no use for it; whoever took its place or its number is another object.
        """
        return [
            place
            for place, (request, before) in enumerate(
                zip(self.requests, self.preemptions, strict=True)
            )
            if request.status is Status.DECODING and request.metrics.num_preemptions == before
        ]
