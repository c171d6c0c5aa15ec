"""The ways of decoding that a load compares, by the names they have on the command line."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from looped_spec.control.config import AdaptiveSpecConfig
from looped_spec.control.cost import CostTable
from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.errors import ConfigError, closest
from looped_spec.offline.load import Profile

if TYPE_CHECKING:
    from looped_spec.runtime.llm import LLM
    from looped_spec.runtime.policy import SpeculationPolicy

Variant = Literal["", "warm", "off", "again"]

NEVER = "never"
ALL = "static:all"
DEFAULT = "never,static:all,ema,goodput"
_FORMS = (NEVER, "never:again", "static:K,d", ALL, "ema", "ema:warm", "goodput", "goodput:warm")
_OFF = "goodput:off"
KNOWN = (*_FORMS, _OFF)
MEANINGS = (
    "never is plain decoding; static:K,d drafts K tokens with d loops in every round, static:all "
    "stands for each candidate of the configuration; ema and goodput choose for every round and "
    "know nothing at the start of a run, with :warm they go on with what they learnt in the runs "
    "before; goodput:off is told that no draft can pay and stays at K = 0, which shows what being "
    "adaptive costs, and never:again is plain decoding once more, which shows the noise"
)
_HOPELESS = 100.0
"""Factor on the cost of drafts that makes a policy stay at K = 0."""

_STATIC = re.compile(r"static:(\d{1,6}),(\d{1,6})", re.ASCII)


@dataclass(frozen=True)
class Way:
    """One way of decoding.

    Attributes:
        name: what it is called in tables and documents.
        policy: "static", "ema" or "goodput".
        candidate: the (K, d) of a static one.
        variant: "warm" keeps what it learnt, "off" stays at K = 0, "again" is a twin.
    """

    name: str
    policy: str
    candidate: Candidate | None = None
    variant: Variant = ""


def is_reference(name: str) -> bool:
    """Tell whether the way of this name may be the best static one: it is static, and no twin."""
    return name == NEVER or name.startswith("static:")


def static_way(candidate: Candidate) -> Way:
    """Return the way that runs the same (K, d) in every round."""
    if not candidate.num_speculative_tokens:
        return Way(NEVER, "static", PLAIN)
    name = f"static:{candidate.num_speculative_tokens},{candidate.draft_loops}"
    return Way(name, "static", candidate)


def split_names(text: str) -> list[str]:
    """Return the names of a list with commas: `never,static:2,1,ema` has three.

    Raises:
        ConfigError: a name is unknown, or stands there twice.
    """
    names = [name.strip() for name in re.split(r",(?!\s*\d)", text)]
    for name in names:
        if name not in KNOWN and not _STATIC.fullmatch(name):
            raise ConfigError(
                f"policies must be of {', '.join(KNOWN)}, got {name!r:.60}{closest(name, KNOWN)}"
            )
        if names.count(name) > 1:
            raise ConfigError(f"policies has '{name}' twice")
    return names


def ways(
    names: Sequence[str], profile: Profile, config: AdaptiveSpecConfig | None, full_loops: int
) -> list[Way]:
    """Return the ways that names stand for, plain decoding first, each once.

    `never` is always among them: speed and tokens of all others are compared with it. `static:all`
    is every candidate that `config` has at a batch size of the profile; `config` is None for a
    model that cannot draft.

    Raises:
        ConfigError: a candidate is out of the model's range, or the model cannot draft.
    """
    found = {NEVER: static_way(PLAIN)}
    for name in names:
        if name == ALL:
            new = [static_way(candidate) for candidate in _reached(profile, _drafting(config))]
        elif match := _STATIC.fullmatch(name):
            new = [static_way(Candidate(int(match[1]), int(match[2])).check(full_loops))]
        elif name == "never:again":
            new = [Way(name, "static", PLAIN, "again")]
        elif name == NEVER:
            continue
        else:
            _drafting(config)
            policy, _, variant = name.partition(":")
            new = [Way(name, policy, variant=variant)]  # type: ignore[arg-type]
        found |= {way.name: way for way in new}
    return list(found.values())


def _drafting(config: AdaptiveSpecConfig | None) -> AdaptiveSpecConfig:
    if config is None:
        raise ConfigError(
            "policies other than never need full_loops of at least 2: with 1 loop there is no "
            "cheaper draft"
        )
    return config


def _reached(profile: Profile, config: AdaptiveSpecConfig) -> list[Candidate]:
    """Return the candidates of all buckets that the phases of a profile lie in, by d and K."""
    buckets = {config.bucket_index(phase.concurrency) for phase in profile.phases}
    every = {c for index in buckets for c in config.buckets[index].candidates}
    return sorted(every, key=lambda c: (c.draft_loops, c.num_speculative_tokens))


def without_hope(config: AdaptiveSpecConfig) -> AdaptiveSpecConfig:
    """Return the configuration with a cost table by which no draft can ever pay.

    Its policy computes all that it computes anyway, and stays at K = 0.
    """
    assert config.cost is not None  # an engine's configuration always has one
    cells = tuple(
        cell._replace(ms=_HOPELESS * cell.ms) if cell.num_speculative_tokens else cell
        for cell in config.cost.cells
    )
    return dataclasses.replace(config, cost=CostTable(cells))


class WaySetter:
    """Sets an LLM to one way after the other.

    Adaptive ways choose from `llm`'s own configuration: that of its options, a preset's or the
    default, as it stood when this was made.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._given: AdaptiveSpecConfig | None = None
        self._warm: dict[str, SpeculationPolicy] = {}
        before = llm.policy
        if llm.options.speculative_adaptive_config is not None:
            self._given = getattr(before, "config", None)
        self.config: AdaptiveSpecConfig | None = None
        if llm.full_loops > 1:
            self._use_adaptive("goodput")
            self.config = getattr(llm.policy, "config", None)
            llm.policy = before

    def use(self, way: Way) -> None:
        """Set the LLM to a way; what a warm one has learnt before, it goes on with."""
        if way.candidate is not None:
            c = way.candidate
            self._llm.set_speculation(c.num_speculative_tokens, c.draft_loops or None)
        elif way.variant == "off":
            assert self.config is not None  # `ways` has refused it
            self._llm.set_adaptive_speculation(without_hope(self.config))
        elif way.name in self._warm:
            self._llm.policy = self._warm[way.name]
        else:
            self._use_adaptive(way.policy)
            if way.variant == "warm":
                self._warm[way.name] = self._llm.policy

    def forget(self) -> None:
        """Let the warm ones begin anew."""
        self._warm.clear()

    def _use_adaptive(self, policy: str) -> None:
        if self._given is None:
            self._llm.set_adaptive_speculation(policy=policy)
        else:
            self._llm.set_adaptive_speculation(dataclasses.replace(self._given, policy=policy))
