"""What is kept of a run of a load: plain numbers, by the names that vLLM's benchmark gives them."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from looped_spec.offline.load_run import LoadRun, RoundMs

TIMELINE_BINS = 96
_MS = 1000.0


def request_hash(token_ids: Sequence[int]) -> str:
    """Return a short fingerprint of a text's tokens, which stands for them in documents."""
    return hashlib.sha256(" ".join(map(str, token_ids)).encode()).hexdigest()[:16]


def run_record(
    run: LoadRun,
    num_switches: int,
    expected: Sequence[str] | None,
    round_ms: RoundMs | None = None,
) -> dict[str, Any]:
    """Return the numbers of one run.

    Times of requests are in milliseconds: `ttft` to the first token, `tpot` per token behind it,
    `itl` between two deliveries (a round delivers up to K + 1 tokens at once), `e2el` to the end.
    `duration` is in seconds, prefill included, and throughputs are per second of it.
    `table_seconds` is what the rounds take by a table of costs.

    Args:
        run: what was measured.
        num_switches: changes of candidate that are no probes.
        expected: `request_hash` of each request's plain text; None for the run that defines it.
        round_ms: the table; without one `table_seconds` is None.
    """
    metrics, seconds = run.metrics, run.seconds
    requests, tokens = len(run.token_ids), run.num_output_tokens
    hashes = [request_hash(ids) for ids in run.token_ids]
    same = len(hashes) if expected is None else sum(map(str.__eq__, hashes, expected))
    record: dict[str, Any] = {
        "completed": requests,
        "failed": 0,
        "total_input": run.num_input_tokens,
        "total_output": tokens,
        "duration": seconds,
        "request_throughput": requests / seconds,
        "output_throughput": tokens / seconds,
        "total_token_throughput": (run.num_input_tokens + tokens) / seconds,
        "mean_acceptance_length": metrics.mean_acceptance_length,
        "draft_acceptance_rate": metrics.draft_acceptance_rate,
        "acceptance_by_position": metrics.acceptance_by_position,
        "rounds_by_candidate": [
            [c.num_speculative_tokens, c.draft_loops, count]
            for c, count in metrics.rounds_by_candidate.items()
        ],
        "switches": num_switches,
        "probe_share": metrics.num_probe_rounds / metrics.num_rounds if metrics.num_rounds else 0.0,
        "off_share": run.off_share(),
        "identical_requests": same,
        "phase_seconds": run.phase_seconds,
        "table_seconds": None if round_ms is None else run.table_seconds(round_ms),
    }
    for name, values in _latencies(run).items():
        record |= _spread_ms(name, values)
    return record


def _latencies(run: LoadRun) -> dict[str, list[float]]:
    """Return the latencies of all requests in seconds, by their names."""
    found: dict[str, list[float]] = {"ttft": [], "tpot": [], "itl": [], "e2el": []}
    for one in run.served:
        if one.first is None:
            continue
        found["ttft"].append(one.first - one.added)
        found["e2el"].append(one.last - one.added)
        found["itl"] += one.gaps
        if one.num_tokens > 1:
            found["tpot"].append((one.last - one.first) / (one.num_tokens - 1))
    return found


def _spread_ms(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """Return mean, median, deviation and 99th percentile in ms; None without values."""
    ordered = sorted(_MS * value for value in seconds)
    if not ordered:
        return {f"{what}_{name}_ms": None for what in ("mean", "median", "std", "p99")}
    return {
        f"mean_{name}_ms": statistics.fmean(ordered),
        f"median_{name}_ms": statistics.median(ordered),
        f"std_{name}_ms": statistics.pstdev(ordered),
        f"p99_{name}_ms": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
    }


def timeline(run: LoadRun, bins: int = TIMELINE_BINS) -> dict[str, list[float | None]]:
    """Return what happened over time, in at most `bins` equal spans of the run.

    `seconds` is the middle of each span since the first request. The others are means over the
    rounds that ran in it, None where none did: tokens per second of the span, requests that
    decoded, K, and d of those rounds that drafted. Tokens of a first forward pass count as well.
    """
    bins = min(bins, len(run.steps))  # more would only repeat the same
    width = run.seconds / bins
    spans: list[list[tuple[int, int, int, int]]] = [[] for _ in range(bins)]
    tokens = [0.0] * bins
    for begin, end, step in _intervals(run):
        # A step's tokens are spread over the time that it took, else long rounds look like bursts.
        low, high = begin / width, end / width
        for place in range(int(low), min(int(high), bins - 1) + 1):
            overlap = min(high, place + 1) - max(low, place)
            tokens[place] += step[3] * (overlap / (high - low) if high > low else 1.0)
            if step[2] and overlap > 0:
                spans[place].append(step)
    return {
        "seconds": [(place + 0.5) * width for place in range(bins)],
        "output_throughput": [count / width for count in tokens],
        "batch_size": [_mean([step[2] for step in span]) for span in spans],
        "num_speculative_tokens": [_mean([step[0] for step in span]) for span in spans],
        "draft_loops": [_mean([step[1] for step in span if step[0]]) for span in spans],
    }


def _intervals(run: LoadRun) -> Iterator[tuple[float, float, tuple[int, int, int, int]]]:
    """Yield begin and end of each step since the first request, with K, d, batch size, tokens."""
    ends = [run.start, *(step.end for step in run.steps)]
    for (begin, end), step in zip(pairwise(ends), run.steps, strict=True):
        k, d = step.candidate.num_speculative_tokens, step.candidate.draft_loops
        yield begin - run.start, end - run.start, (k, d, step.batch_size, step.num_tokens)


def _mean(values: Sequence[int]) -> float | None:
    return statistics.fmean(values) if values else None
