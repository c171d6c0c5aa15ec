"""Small traces for the tests of the simulator."""

from __future__ import annotations

from typing import Any

SURVIVAL = {"1": [0.8, 0.6, 0.5], "2": [0.9, 0.75]}
COST_MS = {"0,0": 5.0, "1,1": 6.0, "3,1": 8.5, "2,2": 8.0}


def phase(**changes: Any) -> dict[str, Any]:
    """Return the document of a phase, with some keys changed, or left out where None."""
    document: dict[str, Any] = {
        "rounds": 20,
        "batch_size": 2,
        "context_tokens": 512,
        "survival": SURVIVAL,
        "cost_ms": COST_MS,
    }
    return {key: value for key, value in (document | changes).items() if value is not None}


def document(*phases: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the document of a trace, of one phase if none is given."""
    whole: dict[str, Any] = {
        "schema_version": 1,
        "full_loops": 4,
        "candidates": [[0, 0], [1, 1], [3, 1], [2, 2]],
        "phases": list(phases) or [phase()],
    }
    return {key: value for key, value in (whole | changes).items() if value is not None}
