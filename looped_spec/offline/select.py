"""Which candidates each range of batch sizes gets, from what was measured on the selection group.

A step of (K, d) gives E(K) tokens a request in T(B, L, K, d); its speedup over plain decoding is
E(K) T(B, L, 0) / T(B, L, K, d) (control.md, section 2).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from looped_spec.control.config import AdaptiveSpecConfig, BatchBucket
from looped_spec.control.goodput_settings import GoodputSettings
from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.control.thresholds import shifted
from looped_spec.errors import ConfigError
from looped_spec.offline.aggregate import Measured, TextKind

SHIFTS = (0.0, -0.75, 0.75, -1.5, 1.5)
"""Other texts than those measured: log-odds of acceptance moved by so much."""

MAX_CANDIDATES = 8


@dataclass(frozen=True)
class Ranking:
    """Predicted speedups at one batch size.

    Attributes:
        batch_size: of the measurements.
        speedups: by kind of text and shift, of every candidate.
    """

    batch_size: int
    speedups: dict[tuple[TextKind, float], dict[Candidate, float]]

    def mean(self, candidate: Candidate) -> float:
        """Return the speedup over all kinds of text, as they were measured."""
        found = [row[candidate] for (_, shift), row in self.speedups.items() if not shift]
        return statistics.harmonic_mean(found)

    @property
    def candidates(self) -> list[Candidate]:
        """All candidates but plain decoding, the best on average first."""
        known = next(iter(self.speedups.values()))
        return sorted(known, key=lambda c: (-self.mean(c), _work(c)))

    def best(self, shift: float | None = None) -> Iterator[tuple[Candidate, float]]:
        """Yield the best candidate for each kind of text, with its speedup."""
        for (_, own), row in self.speedups.items():
            if shift is None or own == shift:
                candidate = max(row, key=lambda c: (row[c], -_work(c)))
                yield candidate, row[candidate]


def rank(measured: Measured, batch_size: int) -> Ranking:
    """Predict the speedups of every candidate that was timed at a batch size.

    Raises:
        ConfigError: the samples tell of no cost there, or of no acceptance at all.
    """
    times = {key[1:]: ms for key, ms in measured.times.items() if key[0] == batch_size}
    candidates = sorted({Candidate(k, d) for _, k, d in times if k}, key=_work)
    known = [c for c in candidates if c.draft_loops in measured.depths]
    if not times:
        raise ConfigError(f"the samples hold no times at batch size {batch_size}")
    if not known:
        raise ConfigError(f"the samples tell of no acceptance: {_why_none(measured)}")
    longest = max(c.num_speculative_tokens for c in known)
    lengths = sorted({length for length, _, _ in times})
    speedups: dict[tuple[TextKind, float], dict[Candidate, float]] = {}
    for kind in measured.kinds:
        for shift in SHIFTS:
            row = {}
            for depth in {c.draft_loops for c in known}:
                if (kind, depth) not in measured.acceptance:
                    continue
                tokens = _tokens(measured.chances(kind, depth, longest), shift)
                for c in known:
                    if c.draft_loops == depth:
                        k = c.num_speculative_tokens
                        row[c] = statistics.mean(
                            tokens[k] * times[length, 0, 0] / times[length, k, depth]
                            for length in lengths
                        )
            if len(row) == len(known):
                speedups[kind, shift] = row
    if not speedups:
        raise ConfigError("the samples tell of no text at every depth: measure more of them")
    return Ranking(batch_size, speedups)


def _why_none(measured: Measured) -> str:
    if measured.refused:
        reasons = "; ".join(map(str, measured.refused))
        return f"{reasons}; take other texts, or a temperature above 0"
    return (
        "too few drafts were tried; give more prompts, or --ignore-eos if the model ends its texts "
        "at once"
    )


def finalists(measured: Measured, batch_size: int, count: int) -> tuple[Candidate, ...]:
    """Return what is worth running on long texts: the best on average, the best of each kind of
    text, and the next best on average."""
    ranking = rank(measured, batch_size)
    order = [ranking.candidates[0], *(c for c, _ in ranking.best(0.0)), *ranking.candidates]
    return tuple(sorted(list(dict.fromkeys(order))[:count], key=_work))


def choose_bucket(
    measured: Measured, batch_size: int, low: int, high: int, margin: float
) -> BatchBucket:
    """Return the candidates of a range of batch sizes around one that was measured.

    What is best for any kind of text, or would be if drafts were accepted more or less often, is
    in, and so is what comes within the margin of the best on average. Where nothing beats plain
    decoding by the margin, on real texts where those were run, plain decoding is all there is.
    """
    ranking = rank(measured, batch_size)
    confirmed = {
        c: statistics.median(found)
        for (size, c), found in measured.speedups.items()
        if size == batch_size
    }
    best_text = max(speedup for _, speedup in ranking.best(0.0))
    noise = measured.confirm_noise or 0.0
    pays = max(confirmed.values(), default=best_text) >= 1 + max(margin, noise)
    if not pays and best_text < 1 + margin:
        return BatchBucket(low, high, (PLAIN,))
    first = max(confirmed, key=lambda c: (confirmed[c], -_work(c)), default=ranking.candidates[0])
    if not pays:
        first = PLAIN
    top = ranking.mean(ranking.candidates[0])
    near = [c for c in ranking.candidates if ranking.mean(c) >= top * (1 - margin)]
    regimes = [c for shift in SHIFTS for c, speedup in ranking.best(shift) if speedup >= 1]
    kept = [c for c in dict.fromkeys([first, *regimes, *near]) if c != PLAIN]
    chosen = (PLAIN, *sorted(kept[: MAX_CANDIDATES - 1], key=_work))
    return BatchBucket(low, high, chosen, chosen.index(first))


def choose_config(
    measured: Measured, full_loops: int, batch_sizes: Sequence[int], margin: float
) -> AdaptiveSpecConfig:
    """Return the configuration: a bucket around each batch size that was measured, and what is
    expected of each depth. Its largest batch is the largest that was measured."""
    sizes = sorted(size for size in batch_sizes if any(key[0] == size for key in measured.times))
    if not sizes:
        raise ConfigError("the samples hold no times: nothing can be selected from them")
    ends = [math.isqrt(a * b) for a, b in itertools.pairwise(sizes)] + [sizes[-1]]
    buckets, low = [], 1
    for size, high in zip(sizes, ends, strict=True):
        buckets.append(choose_bucket(measured, size, low, max(high, low), margin))
        low = buckets[-1].max_batch_size + 1
    offsets = depth_offsets(measured)
    shallowest = _first_chances(measured)[0][1]
    options: dict[str, Any] = {}
    if measured.shadow_ratio is not None:
        options["shadow_cost_ratio"] = round(measured.shadow_ratio, 4)
    return AdaptiveSpecConfig(
        full_loops,
        tuple(buckets),
        depth_offsets=tuple(offsets),
        goodput=GoodputSettings(base_acceptance=round(min(max(shallowest, 0.02), 0.98), 4)),
        **options,
    )


def depth_offsets(measured: Measured) -> list[tuple[int, float]]:
    """Return (d, log-odds of the first draft at d over those at the shallowest depth)."""
    chances = _first_chances(measured)
    base = _logit(chances[0][1])
    return [(depth, round(_logit(chance) - base, 4)) for depth, chance in chances]


def _first_chances(measured: Measured) -> list[tuple[int, float]]:
    """Return (d, p_1) over all kinds of text, each with the same weight."""
    kinds = measured.kinds
    return [
        (depth, statistics.mean(measured.chances(kind, depth, 1)[0] for kind in known))
        for depth in measured.depths
        if (known := [kind for kind in kinds if (kind, depth) in measured.acceptance])
    ]


def _logit(chance: float) -> float:
    chance = min(max(chance, 0.001), 0.999)
    return math.log(chance / (1 - chance))


def _tokens(chances: Sequence[float], shift: float) -> list[float]:
    """Return E(0), E(1), ... of conditional chances whose log-odds are moved."""
    total = survival = 1.0
    found = [1.0]
    for chance in chances:
        survival *= shifted(chance, shift)
        total += survival
        found.append(total)
    return found


def _work(candidate: Candidate) -> int:
    return candidate.num_speculative_tokens * candidate.draft_loops * 1000 + candidate.draft_loops
