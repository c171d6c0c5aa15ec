"""Why K and d were chosen as they were, as `generate --explain` shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from looped_spec.cli.tables import number, plain_table

if TYPE_CHECKING:
    from looped_spec.control.explain import BucketExplanation
    from looped_spec.runtime.llm import LLM


def explain_document(llm: LLM) -> dict[str, Any]:
    """Return all ranges of batch sizes with their candidates, and what the controller counted."""
    stats = llm.stats()
    return {"speculation": stats["speculation"], "controller": stats["controller"]}


def explain_text(llm: LLM) -> str:
    """Return a table for each range of batch sizes that had rounds, and what was counted."""
    explanation, counts = llm.explain(), llm.stats()["controller"]
    ran = {run["bucket"] for run in counts["history"]} if counts else set()
    parts = [
        _bucket_text(bucket)
        for index, bucket in enumerate(explanation.buckets)
        if index in ran or not counts
    ]
    parts += [f"note: {note}" for note in explanation.notes]
    if counts:
        parts.append(
            f"{counts['plans']} rounds planned, {counts['num_switches']} switches, "
            f"{counts['probe_rounds']} probe rounds, {counts['off_rounds']} rounds off, "
            f"{counts['stale_feedback']} late or unknown feedback"
        )
    return "\n".join([f"policy {explanation.policy}", *parts])


def _bucket_text(bucket: BucketExplanation) -> str:
    k, d = bucket.current.num_speculative_tokens, bucket.current.draft_loops
    head = f"batch size {bucket.min_batch_size} to {bucket.max_batch_size}: K={k} d={d}"
    head = f"{head}, {bucket.reason}"
    if not bucket.scores:
        return head
    best = max(score.score for score in bucket.scores)
    rows = [
        (
            ("> " if score.candidate == bucket.current else "  ")
            + f"K={score.candidate.num_speculative_tokens} d={score.candidate.draft_loops}",
            number(score.expected_tokens),
            number(score.cost_ms, 3),
            number(score.score / best, 3) if best > 0 else "-",
        )
        for score in sorted(bucket.scores, key=lambda score: -score.score)
    ]
    return f"{head}\n{plain_table(('', 'tokens a round', 'ms', 'of the best'), rows)}"
