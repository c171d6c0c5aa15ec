"""Which text each request of a load completes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from looped_spec.errors import ConfigError, closest
from looped_spec.offline.load import Profile

MIXED, SHIFTING = "mixed", "shifting"
MEANINGS = (
    f"{MIXED}: the kinds of text in turn, request by request; {SHIFTING}: one kind after the "
    "other, each a like share of the requests; or the name of one kind"
)

Kinds = Mapping[str, Sequence[list[int]]]
"""Prompts as token ids, by the kind of text, in the order in which they were named."""


def prompts_for(profile: Profile, kinds: Kinds, mixture: str) -> list[list[int]]:
    """Return one prompt for every request of a load; a kind's prompts repeat where they are few.

    Raises:
        ConfigError: the mixture is unknown, or needs more than one kind.
    """
    count = profile.num_requests
    if mixture in kinds:
        return _first(kinds[mixture], count)
    if mixture not in (MIXED, SHIFTING):
        known = [MIXED, SHIFTING, *kinds]
        raise ConfigError(
            f"mixture must be of {', '.join(known)}, got '{mixture}'{closest(mixture, known)}"
        )
    if len(kinds) < 2:
        raise ConfigError(
            f"mixture '{mixture}' needs at least two workloads, got {', '.join(kinds)}: give "
            f"another --workload, or --mixture {next(iter(kinds))}"
        )
    sources = [itertools.cycle(rows) for rows in kinds.values()]
    if mixture == MIXED:
        return [next(sources[number % len(sources)]) for number in range(count)]
    return [next(sources[number * len(sources) // count]) for number in range(count)]


def _first(rows: Sequence[list[int]], count: int) -> list[list[int]]:
    return list(itertools.islice(itertools.cycle(rows), count))
