"""Tells when most requests are new ones."""

from __future__ import annotations

from collections import deque

COHORT_ROUNDS = 4


class Cohort:
    """Counts requests that joined within the last `COHORT_ROUNDS` rounds."""

    def __init__(self) -> None:
        self._joined: deque[tuple[int, int]] = deque(maxlen=COHORT_ROUNDS)

    def is_new(self, round_number: int, batch_size: int, new_requests: int) -> bool:
        """Count new requests; return whether at least half of the batch are, and then start over.

        The very first requests replace nobody.
        """
        self._joined.append((round_number, new_requests))
        recent = sum(count for at, count in self._joined if at > round_number - COHORT_ROUNDS)
        if 2 * recent < batch_size:
            return False
        self._joined.clear()
        return round_number > 1
