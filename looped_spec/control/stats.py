"""What the controller did, counted."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from looped_spec.control.plan import Candidate

MAX_SWITCHES = 256
MAX_RUNS = 256

Direction = Literal["up", "down"]


class Switch(NamedTuple):
    """The first plan that ran another candidate, and why. Probes are no switches."""

    plan_id: int
    bucket: int
    previous: Candidate
    candidate: Candidate
    reason: str

    @property
    def direction(self) -> Direction:
        """Up to a longer draft, or a deeper one of the same length, else down."""

        def size(candidate: Candidate) -> tuple[int, int]:
            return candidate.num_speculative_tokens, candidate.draft_loops

        return "up" if size(self.candidate) > size(self.previous) else "down"


class SwitchCount(NamedTuple):
    """How many switches a batch bucket had, all of them, in one direction."""

    bucket: int
    direction: Direction
    switches: int


class PlanRun(NamedTuple):
    """A run of `rounds` equal plans from `plan_id` on."""

    plan_id: int
    bucket: int
    candidate: Candidate
    probe: bool
    rounds: int


@dataclass(frozen=True)
class ControllerStats:
    """Counts since the controller was made.

    Attributes:
        plans: plans handed out.
        feedback: plans whose outcome came back.
        stale_feedback: feedback that came twice, too late, or for a plan that never was.
        invalid_feedback: feedback whose counts contradict themselves; nothing is learnt from it.
        off_rounds: plans with K = 0, where there was something else to choose.
        probe_rounds: plans that were probes.
        num_switches: changes of candidate, all of them.
        switch_counts: the same for each bucket and direction that had any.
        switches: the last `MAX_SWITCHES` of them.
        history: the last `MAX_RUNS` runs of equal plans.
        policy: what the policy counts itself, such as "probe_cost_rounds".
    """

    plans: int
    feedback: int
    stale_feedback: int
    invalid_feedback: int
    off_rounds: int
    probe_rounds: int
    num_switches: int
    switch_counts: tuple[SwitchCount, ...]
    switches: tuple[Switch, ...]
    history: tuple[PlanRun, ...]
    policy: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """Return the same as plain dictionaries, lists, strings and numbers."""
        document = asdict(self)
        document["switches"] = [
            {
                **switch._asdict(),
                "previous": list_of(switch.previous),
                "candidate": list_of(switch.candidate),
            }
            for switch in self.switches
        ]
        document["switch_counts"] = [one._asdict() for one in self.switch_counts]
        document["history"] = [
            {**run._asdict(), "candidate": list_of(run.candidate)} for run in self.history
        ]
        return document


def list_of(candidate: Candidate) -> list[int]:
    """Return [K, d]."""
    return [candidate.num_speculative_tokens, candidate.draft_loops]
