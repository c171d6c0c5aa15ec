"""The last minutes of the engine, for the live page."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from looped_spec.serve.snapshot import EngineSnapshot

INTERVAL_SECONDS = 1.0
POINTS = 300


class History:
    """A ring of points, one per interval, each with what changed since the one before."""

    def __init__(self, interval_seconds: float = INTERVAL_SECONDS, points: int = POINTS) -> None:
        self.interval_seconds = interval_seconds
        self._points: deque[dict[str, Any]] = deque(maxlen=points)
        self._before: tuple[EngineSnapshot, int] | None = None

    def add(self, snapshot: EngineSnapshot, num_generation_tokens: int) -> None:
        """Add a point; the first call only notes where counting starts."""
        before, self._before = self._before, (snapshot, num_generation_tokens)
        if before is None or snapshot.seconds <= before[0].seconds:
            return
        old, new = before[0].metrics, snapshot.metrics
        seconds = snapshot.seconds - before[0].seconds
        accepted = _difference(new.accepted_by_position, old.accepted_by_position)
        proposed = _difference(new.proposed_by_position, old.proposed_by_position)
        candidate = snapshot.candidate
        point = {
            "time": round(time.time(), 3),
            "tokens_per_second": round((num_generation_tokens - before[1]) / seconds, 2),
            "num_running": snapshot.num_running,
            "num_waiting": snapshot.num_waiting,
            "rounds": new.num_rounds - old.num_rounds,
            "plain_rounds": _plain(new.outcomes) - _plain(old.outcomes),
            "accepted_by_position": accepted,
            "proposed_by_position": proposed,
            "num_speculative_tokens": candidate.num_speculative_tokens if candidate else None,
            "draft_loops": candidate.draft_loops if candidate else None,
        }
        self._points.append(point)

    def as_list(self) -> list[dict[str, Any]]:
        """Return the points, the oldest first."""
        return list(self._points)


def _difference(new: list[int], old: list[int]) -> list[int]:
    padded = [*old, *[0] * (len(new) - len(old))]
    return [after - before for after, before in zip(new, padded, strict=True)]


def _plain(outcomes: dict[tuple[int, int, int, int], int]) -> int:
    """Return how many rounds of requests ran without drafts."""
    return sum(count for (k, _, _, _), count in outcomes.items() if k == 0)
