"""Plain against speculative decoding on the bundled model, for every (K, d), interleaved.

Each timed speculative run has a plain run of the same prompts right before or after it, in turn,
and counts as the ratio of the two; a machine that slows down meets both. Reported are the median
of the ratios, the least and the greatest, and whether every token was the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from looped_spec import LLM, SamplingParams
from looped_spec.errors import LoopedSpecError
from looped_spec.offline.machine import machine
from looped_spec.offline.timing import Generated, in_turn, run_prompts

HERE = Path(__file__).resolve().parent
PROMPTS = HERE.parent / "examples" / "prompts.jsonl"
RESULTS = HERE / "results"
PLAIN = (0, 0)


@dataclass(frozen=True)
class Timing:
    """All prompts once, in batches of the size under test."""

    seconds: float
    num_tokens: int
    num_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int


@dataclass(frozen=True)
class Pair:
    """A plain and a speculative run, one after the other."""

    plain: Timing
    speculative: Timing
    identical_requests: int
    requests: int

    @property
    def speedup(self) -> float:
        """Tokens per second of the speculative run by those of the plain one."""
        return (self.speculative.num_tokens / self.speculative.seconds) / (
            self.plain.num_tokens / self.plain.seconds
        )


@dataclass(frozen=True)
class Workload:
    """What every run completes; a prompt has the same seed in all of them."""

    prompts: list[str]
    batch_size: int
    max_tokens: int
    temperature: float


def run(
    llm: LLM, candidate: tuple[int, int], work: Workload, max_tokens: int | None = None
) -> tuple[Timing, list[Generated]]:
    """Complete all prompts and return the counts and what came of every prompt."""
    llm.set_speculation(*candidate)
    params = [
        SamplingParams(
            max_tokens=max_tokens or work.max_tokens,
            temperature=work.temperature,
            seed=seed,
            ignore_eos=True,
        )
        for seed in range(len(work.prompts))
    ]
    done = run_prompts(llm, work.prompts, params, batch_size=work.batch_size)
    timing = Timing(
        seconds=done.seconds,
        num_tokens=done.num_tokens,
        num_rounds=done.metrics.num_rounds,
        num_draft_tokens=done.metrics.num_draft_tokens,
        num_accepted_tokens=done.metrics.num_accepted_tokens,
    )
    return timing, done.outputs


def measure(
    llm: LLM, candidates: Sequence[tuple[int, int]], work: Workload, repeats: int
) -> dict[tuple[int, int], list[Pair]]:
    """Time every candidate `repeats` times beside plain decoding, one round of all at a time."""
    pairs: dict[tuple[int, int], list[Pair]] = {candidate: [] for candidate in candidates}
    for candidate in (PLAIN, *candidates):
        run(llm, candidate, work, max_tokens=8)  # untimed warm-up
    for repeat in range(repeats):
        for candidate in candidates:
            order = (PLAIN, candidate) if repeat % 2 == 0 else (candidate, PLAIN)
            done = in_turn(order, lambda way: run(llm, way, work), 1)
            [(plain, expected)], [(speculative, found)] = done[PLAIN], done[candidate]
            same = sum(a.token_ids == b.token_ids for a, b in zip(expected, found, strict=True))
            pairs[candidate].append(Pair(plain, speculative, same, len(expected)))
        print(f"B={work.batch_size}: {repeat + 1} of {repeats}", file=sys.stderr)
    return pairs


def summary(candidate: tuple[int, int], batch_size: int, pairs: Sequence[Pair]) -> dict[str, Any]:
    """Reduce the pairs of one candidate to what the table shows."""
    ratios = [pair.speedup for pair in pairs]
    runs = [pair.speculative for pair in pairs]
    drafts = sum(timing.num_draft_tokens for timing in runs)
    accepted = sum(timing.num_accepted_tokens for timing in runs)
    rates = {
        name: statistics.median(timing.num_tokens / timing.seconds for timing in timings)
        for name, timings in (("plain", [pair.plain for pair in pairs]), ("speculative", runs))
    }
    return {
        "batch_size": batch_size,
        "num_speculative_tokens": candidate[0],
        "draft_loops": candidate[1],
        "plain_tokens_per_second": round(rates["plain"], 1),
        "tokens_per_second": round(rates["speculative"], 1),
        "speedup": round(statistics.median(ratios), 3),
        "speedup_least": round(min(ratios), 3),
        "speedup_greatest": round(max(ratios), 3),
        "draft_acceptance_rate": round(accepted / drafts, 4) if drafts else None,
        "mean_acceptance_length": round(1 + accepted / sum(t.num_rounds for t in runs), 3),
        "identical_requests": sum(pair.identical_requests for pair in pairs),
        "requests": sum(pair.requests for pair in pairs),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Lay the summaries out as a Markdown table."""
    lines = [
        "| B | K | d | plain tokens/s | tokens/s | speed-up, median (range) | draft acceptance | "
        "mean accepted length | identical requests |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (
            *(row["batch_size"], row["num_speculative_tokens"], row["draft_loops"]),
            f"{row['plain_tokens_per_second']:.0f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['speedup']:.2f} ({row['speedup_least']:.2f} to {row['speedup_greatest']:.2f})",
            "-" if row["draft_acceptance_rate"] is None else f"{row['draft_acceptance_rate']:.2f}",
            f"{row['mean_acceptance_length']:.2f}",
            f"{row['identical_requests']} of {row['requests']}",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo:ouro", help="default: %(default)s")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8], metavar="B")
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[1, 2, 3, 4], metavar="K")
    parser.add_argument("--draft-loops", type=int, nargs="+", default=[1, 2], metavar="d")
    parser.add_argument("--max-tokens", type=int, default=48, help="per prompt: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: %(default)g")
    parser.add_argument("--repeats", type=int, default=5, help="pairs each: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads: %(default)s")
    parser.add_argument("--json", type=Path, help="default: a new file in benchmarks/results")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, keep the raw numbers."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    started = datetime.now(UTC)
    prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    candidates = [(k, d) for d in args.draft_loops for k in args.draft_tokens]
    rows, raw = [], []
    try:
        llm = LLM(args.model, num_threads=args.threads, max_num_seqs=max(args.batch_sizes))
        before = machine(llm)
        for size in args.batch_sizes:
            work = Workload(prompts, size, args.max_tokens, args.temperature)
            for candidate, pairs in measure(llm, candidates, work, args.repeats).items():
                rows.append(summary(candidate, size, pairs))
                raw.append(rows[-1] | {"pairs": [asdict(pair) for pair in pairs]})
    except LoopedSpecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    document = {
        "schema_version": 1,
        "command": ["benchmarks/demo.py", *(sys.argv[1:] if argv is None else argv)],
        "started": started.isoformat(timespec="seconds"),
        "seconds": round((datetime.now(UTC) - started).total_seconds()),
        "model": args.model,
        "full_loops": llm.full_loops,
        "num_prompts": len(prompts),
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "repeats": args.repeats,
        "machine": before,
        "load_average_after": machine(llm)["load_average"],
        "results": raw,
    }
    path = args.json or RESULTS / f"demo-{started:%Y%m%d-%H%M%S}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
    print(table(rows))
    print(f"\n{before}\n{document['seconds']} s; raw numbers in {path}", file=sys.stderr)
    return 0 if all(row["identical_requests"] == row["requests"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
