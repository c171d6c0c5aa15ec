"""A probe: one candidate over one or more rounds, run to learn from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from looped_spec.control.score_table import Arm


class Errand(NamedTuple):
    """What a round does to learn: a position to probe or None, depths to read out, and how many
    rounds from this one on the explorer need not be asked again."""

    position: int | None
    shadows: tuple[int, ...]
    rest: int


@dataclass
class Burst:
    """A probe of one candidate over one or more rounds, each handed out when the one before is
    known.

    Attributes:
        bucket: the bucket that it belongs to.
        arm: what is probed.
        limit: rounds that it may take; four times as many while another depth stays promising.
        is_off: plain decoding is current: the question is whether drafting pays again.
        is_check: the question is whether a change was one.
        issued: rounds handed out.
        returned: rounds whose outcome is known.
        trials: first drafts that were tried.
        hits: how many of them were accepted.
        waited: rounds since the last one was handed out.
        lost: what it lost, in rounds of the current candidate.
    """

    bucket: int
    arm: Arm
    limit: int
    is_off: bool
    issued: int = 0
    returned: int = 0
    trials: int = 0
    hits: int = 0
    waited: int = 0
    lost: float = 0.0
    is_check: bool = False
