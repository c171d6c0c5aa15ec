"""What the pictures of a preset show: for every measured round what it costs and what it gives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from looped_spec.control.cost import analytic_ms
from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.presets import AcceptanceEntry, Preset

MAX_SHAPES = 4
"""Batch sizes and context lengths that a picture shows of each; more would be too small to read."""


@dataclass(frozen=True)
class Point:
    """A (K, d) at a batch size and context length.

    Attributes:
        batch_size: B, decoding requests.
        context_tokens: L, their length.
        candidate: K and d.
        ms: time of a round.
        plain_ms: time of a plain round (K = 0) of the same shape.
        acceptance: alpha, accepted / proposed drafts, 0..1; None where nobody measured the depth.
        is_candidate: the configuration may choose it at this batch size.
        is_initial: the configuration starts from it there.
    """

    batch_size: int
    context_tokens: int
    candidate: Candidate
    ms: float
    plain_ms: float
    acceptance: float | None
    is_candidate: bool
    is_initial: bool

    @property
    def speedup(self) -> float | None:
        """Tokens per second by those of plain decoding: (1 + K alpha) T(0) / T(K, d)."""
        if self.acceptance is None:
            return None
        useful = 1 + self.candidate.num_speculative_tokens * self.acceptance
        return useful * self.plain_ms / self.ms

    def ideal_ms(self, full_loops: int) -> float:
        """Return the time of the RFC's ideal round, c (D + dK), with c from the plain round."""
        return analytic_ms(full_loops, self.candidate, loop_ms=self.plain_ms / full_loops)


def points(preset: Preset, group: str | None) -> list[Point]:
    """Return every round of the cost table that drafts, with the acceptance of a group of texts."""
    entries = {entry.draft_loops: entry for entry in pooled(preset.acceptance, group)}
    found = []
    for b, length, k, d, ms in sorted(preset.cost.cells):
        plain = preset.cost.ms(b, length, PLAIN)
        if not k or plain is None:
            continue
        candidate, entry = Candidate(k, d), entries.get(d)
        bucket = preset.config.buckets[preset.config.bucket_index(b)]
        found.append(
            Point(
                batch_size=b,
                context_tokens=length,
                candidate=candidate,
                ms=ms,
                plain_ms=plain,
                acceptance=None if entry is None else acceptance_rate(entry, k),
                is_candidate=candidate in bucket.candidates,
                is_initial=candidate == bucket.candidates[bucket.initial],
            )
        )
    return found


def acceptance_rate(entry: AcceptanceEntry, num_speculative_tokens: int) -> float | None:
    """Return alpha = (E(K) - 1) / K, None where nothing was tried."""
    if not entry.chances:
        return None
    return (entry.tokens(num_speculative_tokens) - 1) / num_speculative_tokens


def groups(preset: Preset) -> list[str | None]:
    """Return the groups of texts that acceptance was measured on, the selecting one first."""
    found = {entry.group for entry in preset.acceptance}
    return [group for group in ("selection", None, "evaluation") if group in found]


def workloads(preset: Preset, group: str | None) -> list[str]:
    """Return the kinds of text of a group in their order."""
    return list(dict.fromkeys(e.workload for e in preset.acceptance if e.group == group))


def pooled(
    entries: Iterable[AcceptanceEntry], group: str | None, workload: str | None = None
) -> list[AcceptanceEntry]:
    """Return one entry for each depth, by depth: the counts of all texts of a group together, or of
    one kind of text."""
    by_depth: dict[int, list[AcceptanceEntry]] = {}
    for entry in entries:
        if entry.group == group and workload in (None, entry.workload):
            by_depth.setdefault(entry.draft_loops, []).append(entry)
    return [
        AcceptanceEntry(
            workload or "all",
            group,
            depth,
            _sums([entry.accepted for entry in same]),
            _sums([entry.trials for entry in same]),
        )
        for depth, same in sorted(by_depth.items())
    ]


def best(found: Iterable[Point]) -> Point | None:
    """Return the point of the greatest speed-up; None if none has any, or none is above 1."""
    fast = [point for point in found if point.speedup is not None and point.speedup > 1]
    return max(fast, key=lambda point: point.speedup or 0.0, default=None)


def at(found: Iterable[Point], batch_size: int, context_tokens: int) -> list[Point]:
    """Return the points of one shape."""
    return [p for p in found if (p.batch_size, p.context_tokens) == (batch_size, context_tokens)]


def shapes(found: Iterable[Point]) -> tuple[list[int], list[int]]:
    """Return all batch sizes and all context lengths, ascending."""
    points = list(found)
    return (
        sorted({point.batch_size for point in points}),
        sorted({point.context_tokens for point in points}),
    )


def few(found: Iterable[Point]) -> tuple[list[int], list[int]]:
    """Return batch sizes and context lengths to show, spread over those that there are."""
    sizes, lengths = shapes(found)
    return _spread(sizes), _spread(lengths)


def _spread(values: Sequence[int]) -> list[int]:
    if len(values) <= MAX_SHAPES:
        return list(values)
    last = len(values) - 1
    return [values[round(place * last / (MAX_SHAPES - 1))] for place in range(MAX_SHAPES)]


def depths_of(found: Iterable[Point]) -> list[int]:
    """Return every d, ascending."""
    return sorted({point.candidate.draft_loops for point in found})


def drafts_of(found: Iterable[Point]) -> list[int]:
    """Return every K, ascending."""
    return sorted({point.candidate.num_speculative_tokens for point in found})


def named(point: Point) -> str:
    """Return K and d as they stand in a sentence."""
    return f"K={point.candidate.num_speculative_tokens}, d={point.candidate.draft_loops}"


def _sums(columns: Sequence[Sequence[float]]) -> tuple[float, ...]:
    length = max(map(len, columns))
    return tuple(
        sum(column[place] for column in columns if place < len(column)) for place in range(length)
    )
