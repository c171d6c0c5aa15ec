"""The engine's own counts as Prometheus metrics, and the text of /metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from looped_spec.control.plan import Candidate
from looped_spec.serve.latencies import Latencies
from looped_spec.serve.snapshot import EngineSnapshot
from looped_spec.serve.speculation import num_drafting_rounds

Family = TypeVar("Family", GaugeMetricFamily, CounterMetricFamily)

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Collected(CollectorRegistry):
    """Metrics that were collected already, those of one name as one."""

    def __init__(self, families: Iterable[Metric]) -> None:
        super().__init__()
        self._families: dict[str, Metric] = {}
        for family in families:
            known = self._families.setdefault(family.name, family)
            if known is not family:
                known.samples += family.samples

    def collect(self) -> Iterator[Metric]:
        yield from self._families.values()


def metrics_text(families: Iterable[Metric]) -> bytes:
    """Return metrics in the text format, which every scraper reads; those of one name as one.

    The library's OpenMetrics format would spell the colon of our names as an underscore.
    """
    return generate_latest(_Collected(families))


class EngineCollector:
    """Turns the newest snapshot into metrics; empty before there is one."""

    def __init__(self, prefix: str, latencies: Latencies) -> None:
        self.snapshot: EngineSnapshot | None = None
        self._prefix = prefix
        self._labels = latencies.labels
        self._registry = latencies.registry
        self._registry.register(self)

    def families(self, snapshot: EngineSnapshot | None) -> list[Metric]:
        """Return all metrics of the registry, with those of a snapshot."""
        self.snapshot = snapshot
        return list(self._registry.collect())

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the snapshot."""
        snapshot = self.snapshot
        if snapshot is None:
            return
        counts = snapshot.metrics
        used = 1 - snapshot.num_free_blocks / snapshot.num_blocks
        yield self._gauge("num_requests_running", "Requests in the batch.", snapshot.num_running)
        yield self._gauge("num_requests_waiting", "Requests in the queue.", snapshot.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of cache blocks in use, 0 to 1.", used)
        yield self._counter(
            "num_preemptions",
            "Times that a request gave its memory back.",
            snapshot.num_preemptions,
        )
        prefixes = snapshot.prefix_cache
        if prefixes is not None:
            yield self._counter(
                "prefix_cache_queries",
                "Prompt tokens looked up among those computed before.",
                prefixes.num_queries,
            )
            yield self._counter(
                "prefix_cache_hits",
                "Prompt tokens found there, which were not computed again.",
                prefixes.num_hits,
            )
        yield self._counter(
            "spec_decode_num_drafts",
            "Rounds of a request in which tokens were drafted.",
            num_drafting_rounds(counts),
        )
        yield self._counter(
            "spec_decode_num_draft_tokens",
            "Drafts that could have been committed.",
            counts.num_draft_tokens,
        )
        yield self._counter(
            "spec_decode_num_accepted_tokens",
            "Drafts that were committed.",
            counts.num_accepted_tokens,
        )
        by_position = self._family(
            CounterMetricFamily,
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafts that were committed, by their position in the draft, from 0.",
            "position",
        )
        for position, accepted in enumerate(counts.accepted_by_position):
            by_position.add_metric([*self._labels.values(), str(position)], accepted)
        yield by_position
        yield from self._adaptive(snapshot)

    def _adaptive(self, snapshot: EngineSnapshot) -> Iterator[Metric]:
        drafted = self._family(
            GaugeMetricFamily,
            "adaptive_num_speculative_tokens",
            "K that a batch of this size runs now.",
            "bucket",
        )
        loops = self._family(
            GaugeMetricFamily,
            "adaptive_draft_loops",
            "d that a batch of this size runs now.",
            "bucket",
        )
        acceptance = self._family(
            GaugeMetricFamily,
            "adaptive_acceptance_ema",
            "Acceptance per draft that the policy expects of it, 0 to 1.",
            "bucket",
        )
        switches = self._family(
            CounterMetricFamily,
            "adaptive_switches",
            "Changes of (K, d), to longer or deeper drafts (up) or shorter ones (down).",
            "bucket",
            "direction",
        )
        labels = list(self._labels.values())

        def add(bucket: str, candidate: Candidate, expected: float | None) -> None:
            drafted.add_metric([*labels, bucket], candidate.num_speculative_tokens)
            loops.add_metric([*labels, bucket], candidate.draft_loops)
            if expected is not None:
                acceptance.add_metric([*labels, bucket], expected)

        for one in snapshot.explanation.buckets:
            k = one.current.num_speculative_tokens
            tokens = [s.expected_tokens for s in one.scores if s.candidate == one.current]
            expected = (tokens[0] - 1) / k if k and tokens else None
            add(f"{one.min_batch_size}-{one.max_batch_size}", one.current, expected)
        controller = snapshot.controller
        for bucket, direction, count in controller.switch_counts if controller else ():
            sizes = snapshot.explanation.buckets[bucket]
            name = f"{sizes.min_batch_size}-{sizes.max_batch_size}"
            switches.add_metric([*labels, name, direction], count)
        yield from (drafted, loops, acceptance, switches)
        yield self._counter(
            "adaptive_disabled_rounds",
            "Rounds that the controller ran without drafts.",
            controller.off_rounds if controller else 0,
        )
        yield self._counter(
            "adaptive_stale_feedback",
            "Feedback of rounds that came twice or too late.",
            controller.stale_feedback if controller else 0,
        )

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = self._family(GaugeMetricFamily, name, text)
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = self._family(CounterMetricFamily, name, text)
        family.add_metric(list(self._labels.values()), value)
        return family

    def _family(self, kind: type[Family], name: str, text: str, *more_labels: str) -> Family:
        return kind(f"{self._prefix}:{name}", text, labels=[*self._labels, *more_labels])
