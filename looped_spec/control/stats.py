"""What the controller did, counted."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from looped_spec.control.plan import Candidate

MAX_SWITCHES = 256
MAX_RUNS = 256


class Switch(NamedTuple):
    """The first plan that ran another candidate, and why. Probes are no switches."""

    plan_id: int
    bucket: int
    previous: Candidate
    candidate: Candidate
    reason: str


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
        document["history"] = [
            {**run._asdict(), "candidate": list_of(run.candidate)} for run in self.history
        ]
        return document


def list_of(candidate: Candidate) -> list[int]:
    """Return [K, d]."""
    return [candidate.num_speculative_tokens, candidate.draft_loops]
