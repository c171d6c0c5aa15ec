"""What the controller may choose from, and how it chooses: data, validated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from looped_spec.control.acceptance_prior import AcceptancePrior
from looped_spec.control.cost import CostTable
from looped_spec.control.goodput_settings import GoodputSettings, check_number
from looped_spec.control.plan import Candidate
from looped_spec.errors import ConfigError, check_int

MAX_BATCH_SIZE = 2**16
"""Upper end of a bucket, as of `max_num_seqs`: the controller keeps a table of batch sizes."""

POLICIES = ("static", "ema", "goodput")


@dataclass(frozen=True)
class BatchBucket:
    """The candidates of a range of batch sizes.

    Attributes:
        min_batch_size: least number of decoding requests, inclusive.
        max_batch_size: most, inclusive.
        candidates: what may run, in the order in which `ema` climbs; K = 0 is plain decoding.
        initial: position in `candidates` to start from.
        up: acceptance, per position, above which `ema` moves to the next candidate; None derives it
            from the cost.
        down: acceptance, per position, below which `ema` moves to the previous one; None likewise.
    """

    min_batch_size: int
    max_batch_size: int
    candidates: tuple[Candidate, ...]
    initial: int = 0
    up: tuple[float, ...] | None = None
    down: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check_int("min_batch_size", self.min_batch_size, 1)
        check_int("max_batch_size", self.max_batch_size, self.min_batch_size, MAX_BATCH_SIZE)
        object.__setattr__(self, "candidates", tuple(self.candidates))
        if not self.candidates:
            raise ConfigError("candidates of a batch bucket must not be empty")
        for candidate in self.candidates:
            if self.candidates.count(candidate) > 1:
                raise ConfigError(f"candidates has {_pair(candidate)} twice")
        check_int("initial", self.initial, 0, len(self.candidates) - 1)
        for name in ("up", "down"):
            thresholds = getattr(self, name)
            if thresholds is None:
                continue
            object.__setattr__(self, name, tuple(thresholds))
            if len(thresholds) != len(self.candidates):
                raise ConfigError(
                    f"{name} must have one threshold for each of {len(self.candidates)} "
                    f"candidates, got {len(thresholds)}"
                )
            for threshold in thresholds:
                check_number(f"{name} threshold", threshold, 0.0, 1.0)
        if self.up is not None and self.down is not None:
            for low, high in zip(self.down, self.up, strict=True):
                if low > high:
                    raise ConfigError(f"down threshold {low:g} is above up threshold {high:g}")

    @property
    def max_speculative_tokens(self) -> int:
        """The largest K."""
        return max(c.num_speculative_tokens for c in self.candidates)

    @property
    def max_rows(self) -> int:
        """Rows of the widest verification: B (K + 1)."""
        return self.max_batch_size * (self.max_speculative_tokens + 1)


@dataclass(frozen=True)
class AdaptiveSpecConfig:
    """Everything the controller decides by.

    Attributes:
        full_loops: D, loops of the target.
        buckets: ranges of batch sizes, ascending, from 1 to the most requests that run at once,
            without gap or overlap.
        policy: "goodput" (expected tokens per second), "ema" (acceptance thresholds) or "static"
            (each bucket's initial candidate).
        cost: measured round times; None means the ideal formula, corrected online.
        acceptance_prior: what `goodput` believes of acceptance before the first round; None takes
            `goodput.base_acceptance` and `depth_offsets`.
        ema_beta: weight of new feedback in the acceptance EMA.
        warmup_rounds: rounds of feedback that a candidate needs before `ema` moves from it.
        interval: rounds of feedback between two decisions of `ema`.
        probe_interval: rounds that `ema` stays off before its first probe; doubles with every
            probe that fails.
        max_probe_interval: where the doubling ends.
        probe_rounds: rounds of a probe of `ema`.
        padded_batch_sizes: batch sizes that the engine pads to; a larger batch keeps its own.
        switch_cost_rounds: rounds of time lost by each change from plain decoding to drafting.
        state_fresh_when_off: plain decoding keeps what drafts need up to date. If not, K = 0 is
            never chosen where there is anything else.
        shadow_depths_available: the engine can read out verified rows at other depths.
        shadow_cost_ratio: time of one shadow readout over that of one loop pass of the same rows.
        depth_offsets: ((d, gain), ...): log-odds of the acceptance of the first draft at d loops,
            relative to any other depth named; None takes `goodput.depth_offset_logits`.
        goodput: numbers of the goodput policy.
    """

    full_loops: int
    buckets: tuple[BatchBucket, ...]
    policy: str = "goodput"
    cost: CostTable | None = None
    acceptance_prior: AcceptancePrior | None = None
    ema_beta: float = 0.15
    warmup_rounds: int = 8
    interval: int = 8
    probe_interval: int = 8
    max_probe_interval: int = 512
    probe_rounds: int = 4
    padded_batch_sizes: tuple[int, ...] = ()
    switch_cost_rounds: float = 0.0
    state_fresh_when_off: bool = True
    shadow_depths_available: bool = False
    shadow_cost_ratio: float = 0.1
    depth_offsets: tuple[tuple[int, float], ...] | None = None
    goodput: GoodputSettings = field(default_factory=GoodputSettings)

    def __post_init__(self) -> None:
        check_int("full_loops", self.full_loops, 1)
        if self.policy not in POLICIES:
            raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, got {self.policy!r}")
        object.__setattr__(self, "buckets", tuple(self.buckets))
        self._check_buckets()
        check_number("ema_beta", self.ema_beta, 0.0, 1.0)
        for name in ("warmup_rounds", "interval", "probe_interval", "probe_rounds"):
            check_int(name, getattr(self, name), 1)
        check_int("max_probe_interval", self.max_probe_interval, self.probe_interval)
        sizes = tuple(sorted(set(self.padded_batch_sizes)))
        for size in sizes:
            check_int("padded_batch_sizes", size, 1)
        object.__setattr__(self, "padded_batch_sizes", sizes)
        for name in ("state_fresh_when_off", "shadow_depths_available"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r:.40}")
        check_number("switch_cost_rounds", self.switch_cost_rounds, 0.0)
        check_number("shadow_cost_ratio", self.shadow_cost_ratio, 0.0)
        for depth, gain in self.depth_offsets or ():
            check_int("depth of depth_offsets", depth, 1, self.full_loops - 1)
            check_number("gain of depth_offsets", gain, -20.0, 20.0)
        for entry in self.acceptance_prior.counts if self.acceptance_prior else ():
            check_int("draft_loops of acceptance_prior", entry.draft_loops, 1, self.full_loops - 1)

    def _check_buckets(self) -> None:
        if not self.buckets:
            raise ConfigError("buckets must not be empty")
        if self.buckets[0].min_batch_size != 1:
            raise ConfigError(
                f"buckets must start at batch size 1, got {self.buckets[0].min_batch_size}"
            )
        for low, high in pairwise(self.buckets):
            if high.min_batch_size != low.max_batch_size + 1:
                what = "a gap" if high.min_batch_size > low.max_batch_size else "an overlap"
                raise ConfigError(
                    f"buckets have {what} between {low.max_batch_size} and {high.min_batch_size}: "
                    f"min_batch_size must be {low.max_batch_size + 1}"
                )
        for bucket in self.buckets:
            for candidate in bucket.candidates:
                if candidate.check(self.full_loops) != candidate:
                    raise ConfigError(
                        f"draft_loops must be 0 with num_speculative_tokens 0, got "
                        f"{candidate.draft_loops}"
                    )

    @property
    def max_num_seqs(self) -> int:
        """The largest batch that the buckets cover."""
        return self.buckets[-1].max_batch_size

    @property
    def max_speculative_tokens(self) -> int:
        """The largest K of any bucket: what buffers are sized for, whatever K a round runs."""
        return max(bucket.max_speculative_tokens for bucket in self.buckets)

    @property
    def max_rows(self) -> int:
        """Rows of the widest verification of any bucket: the most of B (K + 1)."""
        return max(bucket.max_rows for bucket in self.buckets)

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every candidate of any bucket, once, by K and then d."""
        every = {c for bucket in self.buckets for c in bucket.candidates}
        return tuple(sorted(every, key=lambda c: (c.num_speculative_tokens, c.draft_loops)))

    def check_engine(self, max_num_seqs: int, max_rows: int | None = None) -> AdaptiveSpecConfig:
        """Return self if an engine of these sizes can run every candidate, else raise.

        `max_rows` is what its widest buffers hold, in rows of B (K + 1).
        """
        if max_num_seqs != self.max_num_seqs:
            raise ConfigError(
                f"buckets must cover batch sizes 1 to max_num_seqs = {max_num_seqs}, they end at "
                f"{self.max_num_seqs}"
            )
        if max_rows is not None and max_rows < self.max_rows:
            raise ConfigError(
                f"buffers of {max_rows} rows are too small: the largest candidate needs "
                f"{self.max_rows} rows, B (K + 1)"
            )
        return self

    def bucket_index(self, batch_size: int) -> int:
        """Return the index of the bucket of a batch size; beyond the last it is the last."""
        for index, bucket in enumerate(self.buckets):
            if batch_size <= bucket.max_batch_size:
                return index
        return len(self.buckets) - 1

    def padded(self, batch_size: int) -> int:
        """Return the batch size that really runs: the next of `padded_batch_sizes`, or itself."""
        for size in self.padded_batch_sizes:
            if size >= batch_size:
                return size
        return batch_size

    def to_json(self) -> dict[str, Any]:
        """Return the configuration as a JSON document."""
        from looped_spec.control.config_json import config_document

        return config_document(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> AdaptiveSpecConfig:
        """Read what `to_json` wrote; an unknown key is an error that names the closest."""
        from looped_spec.control.config_json import read_config

        return read_config(document)

    @classmethod
    def default(
        cls, full_loops: int, max_num_seqs: int, *, policy: str = "goodput", **options: Any
    ) -> AdaptiveSpecConfig:
        """Return a configuration for a model of `full_loops` loops that nothing else is known of;
        `options` are fields of this class."""
        from looped_spec.control.default_config import default_buckets

        buckets = default_buckets(full_loops, max_num_seqs, policy)
        return cls(full_loops, buckets, policy, **options)

    @classmethod
    def pinned(
        cls, candidate: Candidate, full_loops: int, max_num_seqs: int, **options: Any
    ) -> AdaptiveSpecConfig:
        """Return a configuration that runs one candidate at any batch size."""
        buckets: Sequence[BatchBucket] = [BatchBucket(1, max_num_seqs, (candidate,))]
        return cls(full_loops, tuple(buckets), "static", **options)


def _pair(candidate: Candidate) -> str:
    return f"({candidate.num_speculative_tokens}, {candidate.draft_loops})"
