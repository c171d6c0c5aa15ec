"""Measures scenarios: a load, a mixture of texts, and all ways of decoding, run in turn.

Ways run one after the other, or beside each other by turns. Every run that ended is kept at once by
`LoadBench.document`, so that an interruption loses at most the run in the middle (by turns, the
repeat), and a later call goes on where this one stopped.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from looped_spec.control.controller import AdaptiveController
from looped_spec.control.cost_model import CostModel
from looped_spec.errors import UnsupportedError
from looped_spec.offline.load import Phase, Profile
from looped_spec.offline.load_lanes import drive_together
from looped_spec.offline.load_policy import NEVER, Way, WaySetter
from looped_spec.offline.load_record import request_hash, run_record, timeline
from looped_spec.offline.load_run import Clock, LoadRun, RoundMs, drive
from looped_spec.offline.load_summary import headroom, summarize, verdicts
from looped_spec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from looped_spec.runtime.engine import Engine
    from looped_spec.runtime.llm import LLM
    from looped_spec.runtime.policy import SpeculationPolicy

SCHEMA_VERSION = 1
WARM_UP_TOKENS = 8
"""New tokens of each request of the untimed run that every way begins with."""


@dataclass(frozen=True)
class Scenario:
    """What is compared: ways of decoding under one load with one choice of prompts."""

    group: str
    mixture: str
    profile: Profile
    ways: tuple[Way, ...]
    prompts: tuple[list[int], ...]

    @property
    def key(self) -> tuple[str, str, str, bool]:
        """What tells it from the others of a document."""
        return self.group, self.mixture, self.profile.name, self.profile.drains

    def header(self) -> dict[str, Any]:
        """Return what a document says of it before anything was measured."""
        return {
            "group": self.group,
            "mixture": self.mixture,
            "profile": self.profile.name,
            "kind": self.profile.kind,
            "drains": self.profile.drains,
            "phases": [[phase.concurrency, phase.num_requests] for phase in self.profile.phases],
            "distinct_prompts": len(set(map(tuple, self.prompts))),
            "policies": [way.name for way in self.ways],
        }


class LoadBench:
    """Scenarios of one model, measured one after the other.

    Args:
        llm: the model; it is left as it was.
        setter: sets it to one way after the other.
        params: of every request; the seed of request n is theirs plus n.
        repeats: timed runs of each way in each scenario.
        turn_seconds: if given, the ways of a repeat run beside each other, by turns of this length,
            each on an engine with a cache of its own.
        clock: seconds.

    Raises:
        UnsupportedError: turns are asked for where a round may be in the air between two steps.
    """

    def __init__(
        self,
        llm: LLM,
        setter: WaySetter,
        params: SamplingParams,
        repeats: int,
        *,
        turn_seconds: float | None = None,
        clock: Clock | None = None,
    ) -> None:
        if turn_seconds is not None and llm.engine.async_scheduling:
            raise UnsupportedError(
                "interleave needs rounds that end with their step: turn async_scheduling off"
            )
        self._llm, self._setter, self._params = llm, setter, params
        self._repeats, self._turn_seconds = repeats, turn_seconds
        self._engines: dict[str, Engine] = {}
        config = setter.config
        self._round_ms: RoundMs | None = None
        if config is not None and config.cost is not None:
            self._round_ms = CostModel(config).ms
        self._options: dict[str, Any] = {} if clock is None else {"clock": clock}
        self._measured: dict[tuple[str, str, str, bool], dict[str, Any]] = {}

    def resume(self, scenarios: Sequence[Mapping[str, Any]]) -> None:
        """Take over what an earlier call has measured, `document()` of it; runs that are there are
        not run again."""
        for one in scenarios:
            key = one["group"], one["mixture"], one["profile"], one["drains"]
            self._measured[key] = dict(one)

    def missing(self, scenario: Scenario) -> list[tuple[int, Way]]:
        """Return repeat and way of the runs that a scenario still needs, in the order to run them.

        The order of the ways turns round with each repeat, so that each stands as often before as
        behind any other, and a machine that slows down meets all of them.
        """
        found = self._measured.get(scenario.key, {}).get("runs", {})
        return [
            (repeat, way)
            for repeat in range(self._repeats)
            for way in (scenario.ways if repeat % 2 == 0 else scenario.ways[::-1])
            if str(repeat) not in found.get(way.name, {})
        ]

    def measure(
        self, scenario: Scenario, on_run: Callable[[Way, dict[str, Any]], object]
    ) -> dict[str, Any]:
        """Run what is missing of a scenario and return what is known of it then.

        `on_run` is called after each run with its way and its record, never within one.
        """
        entry = self._measured.setdefault(
            scenario.key, scenario.header() | {"plain": None, "runs": {}, "timelines": {}}
        )
        todo = self.missing(scenario)
        before, engine = self._llm.policy, self._llm.engine
        try:
            if todo:
                waiting = {way for _, way in todo}
                self._warm_up(scenario, [way for way in scenario.ways if way in waiting])
            for repeat, group in groupby(todo, itemgetter(0)):
                for way, run, switches in self._runs(scenario, [way for _, way in group]):
                    on_run(way, self._keep(way, run, switches, repeat, entry))
        finally:
            self._llm.engine, self._llm.policy = engine, before
        return self._summarized(entry)

    def document(self) -> list[dict[str, Any]]:
        """Return all scenarios that have a run, with their summaries."""
        return [self._summarized(entry) for entry in self._measured.values() if entry["runs"]]

    def _warm_up(self, scenario: Scenario, ways: Sequence[Way]) -> None:
        """Run every way shortly, at the largest batch of the profile and at each other one."""
        short = dataclasses.replace(
            self._params, max_tokens=min(self._params.max_tokens, WARM_UP_TOKENS)
        )
        sizes = sorted({phase.concurrency for phase in scenario.profile.phases}, reverse=True)
        brief = Profile("warm-up", "ramp", tuple(Phase(size, size) for size in sizes), True)
        for way in ways:
            self._use(way)
            drive(self._llm.engine, brief, scenario.prompts, short)
        self._setter.forget()

    def _use(self, way: Way) -> None:
        """Set the LLM to a way; by turns, on the engine that is that way's own."""
        if self._turn_seconds is not None:
            if way.name not in self._engines:
                self._engines[way.name] = self._llm.another_engine()
            self._llm.engine = self._engines[way.name]
        self._setter.use(way)

    def _runs(self, scenario: Scenario, ways: Sequence[Way]) -> Iterator[tuple[Way, LoadRun, int]]:
        """Run some ways once each; yield each with what was measured, and how often what chooses
        (K, d) changed its mind."""
        load = scenario.profile, scenario.prompts, self._params
        if self._turn_seconds is None:
            for way in ways:
                self._use(way)
                before = _num_switches(self._llm.policy)
                gc.collect()
                run = drive(self._llm.engine, *load, **self._options)
                yield way, run, _num_switches(self._llm.policy) - before
            return
        for way in ways:
            self._use(way)
        engines = [self._engines[way.name] for way in ways]
        counts = [_num_switches(engine.policy) for engine in engines]
        gc.collect()
        runs = drive_together(engines, *load, self._turn_seconds, **self._options)
        for way, engine, run, before in zip(ways, engines, runs, counts, strict=True):
            yield way, run, _num_switches(engine.policy) - before

    def _keep(
        self, way: Way, run: LoadRun, switches: int, repeat: int, entry: dict[str, Any]
    ) -> dict[str, Any]:
        if entry["plain"] is None:
            assert way.name == NEVER  # it is the first of the first repeat
            entry["plain"] = [request_hash(ids) for ids in run.token_ids]
        record = run_record(run, switches, entry["plain"], self._round_ms)
        entry["runs"].setdefault(way.name, {})[str(repeat)] = record
        entry["timelines"].setdefault(way.name, timeline(run))
        return record

    def _summarized(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        rows = summarize(entry["policies"], entry["runs"])
        return dict(entry) | {
            "results": rows,
            "headroom": headroom(entry["policies"], entry["runs"]),
            "verdicts": verdicts(entry["kind"], rows),
        }


def _num_switches(policy: SpeculationPolicy) -> int:
    """Return how often what chooses (K, d) has changed its mind, probes excluded."""
    return policy.stats().num_switches if isinstance(policy, AdaptiveController) else 0
