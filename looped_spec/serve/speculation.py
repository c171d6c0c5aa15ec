"""What speculation did for one HTTP request, with vLLM's keys."""

from __future__ import annotations

from typing import Any

from looped_spec.runtime.outputs import SpeculationMetrics


def num_drafting_rounds(metrics: SpeculationMetrics) -> int:
    """Return how many rounds of a request drafted what could have been committed."""
    return sum(count for (_, _, proposed, _), count in metrics.outcomes.items() if proposed)


def request_metrics(metrics: SpeculationMetrics, is_detailed: bool) -> dict[str, Any]:
    """Return what goes under `metrics.speculative_decoding` of an answer.

    A step is a round that drafted; the bonus token is part of the mean acceptance length and not of
    the acceptance rate. Rates are None where nothing was drafted.
    """
    steps = num_drafting_rounds(metrics)
    accepted = metrics.num_accepted_tokens
    document: dict[str, Any] = {
        "mean_acceptance_length": 1 + accepted / steps if steps else None,
        "draft_acceptance_rate": metrics.draft_acceptance_rate,
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": metrics.num_draft_tokens,
        "num_spec_tokens": max((k for k, _, _, _ in metrics.outcomes), default=0),
    }
    if is_detailed:
        by_length: dict[int, list[int]] = {}
        for (_, _, proposed, taken), count in sorted(metrics.outcomes.items()):
            if proposed:
                by_length.setdefault(proposed, [0] * (proposed + 1))[taken] += count
        longest = max(by_length, default=-1)
        histogram = [
            sum(counts[n] for length, counts in by_length.items() if n <= length)
            for n in range(longest + 1)
        ]
        document["acceptance_histogram"] = histogram
        document["acceptance_histogram_by_draft_length"] = {
            str(length): counts for length, counts in sorted(by_length.items())
        }
    return document
