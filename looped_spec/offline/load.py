"""Loads that keep an engine busy with a given number of requests.

A load is closed: whenever a request ends the next one starts, so that the batch size is what the
load says. The requests and their order are the same whatever speculation does, so that times of two
runs compare.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from looped_spec.control.config import MAX_BATCH_SIZE
from looped_spec.errors import ConfigError, check_int

Kind = Literal["fixed", "ramp"]

MAX_REQUESTS_PER_SLOT = 10_000
_FORM = (
    "fixed:B or ramp:B-B-..., such as fixed:8 or ramp:1-8-32-8-1, with Bx3 for 3 requests a slot"
)
_PROFILE = re.compile(r"(fixed|ramp):(.+)", re.ASCII)
_PHASE = re.compile(r"(\d{1,9})(?:x(\d{1,9}))?", re.ASCII)


@dataclass(frozen=True)
class Phase:
    """Start `num_requests` requests, keeping `concurrency` of them running."""

    concurrency: int
    num_requests: int


@dataclass(frozen=True)
class Profile:
    """Phases, one after the other; the last one's requests run to their end.

    Attributes:
        name: what it was given as, such as "ramp:1-8-32-8-1".
        kind: "fixed", one phase, or "ramp", several.
        phases: in their order.
        drains: every request of a phase ends before the next phase begins; else the next one begins
            as soon as the last request of a phase has started.
    """

    name: str
    kind: Kind
    phases: tuple[Phase, ...]
    drains: bool = False

    @classmethod
    def parse(cls, text: str, requests_per_slot: int = 1, drains: bool = False) -> Profile:
        """Make a profile of its name.

        `requests_per_slot` is how many requests every place of the batch has, one after the other,
        in phases that do not say it themselves (`8x3`).

        Raises:
            ConfigError: the text is no profile, or a number in it is out of its range.
        """
        check_int("requests_per_slot", requests_per_slot, 1, MAX_REQUESTS_PER_SLOT)
        match = _PROFILE.fullmatch(text.strip())
        if match is None:
            raise ConfigError(f"profile must be {_FORM}; got {text!r:.60}")
        phases = [
            _phase(word, text, requests_per_slot) for word in match[2].replace(" ", "").split("-")
        ]
        if match[1] == "fixed":
            if len(phases) != 1:
                raise ConfigError(
                    f"profile '{text}' has {len(phases)} phases: a fixed one has a single batch "
                    "size, several make a ramp"
                )
            return cls(text.strip(), "fixed", tuple(phases), drains)
        return cls(text.strip(), "ramp", tuple(phases), drains)

    @property
    def num_requests(self) -> int:
        """How many prompts it takes."""
        return sum(phase.num_requests for phase in self.phases)

    @property
    def max_concurrency(self) -> int:
        """The largest batch."""
        return max(phase.concurrency for phase in self.phases)


def _phase(word: str, profile: str, requests_per_slot: int) -> Phase:
    match = _PHASE.fullmatch(word)
    if match is None:
        raise ConfigError(f"profile must be {_FORM}; got '{word}' in {profile!r:.60}")
    size, slots = int(match[1]), int(match[2] or requests_per_slot)
    check_int(f"batch size of profile '{profile}'", size, 1, MAX_BATCH_SIZE)
    check_int(f"requests per slot of profile '{profile}'", slots, 1, MAX_REQUESTS_PER_SLOT)
    return Phase(size, size * slots)
