"""Draft acceptance of a demo for every (K, d), measured by the engine on texts new to the model.

Each prompt is the beginning of a document; the engine continues it greedily. Nothing is timed, and
every token is compared with that of plain decoding.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from results import add_workload_flag, markdown, run_command
from tqdm import tqdm

from looped_spec import LLM, SamplingParams
from looped_spec.errors import check_int
from looped_spec.offline.machine import machine
from looped_spec.offline.workloads import Workload, named_paths, read_workloads

Candidate = tuple[int, int]


def complete(
    llm: LLM, candidate: Candidate, work: Workload, max_tokens: int
) -> tuple[list[list[int]], int, int, int]:
    """Return the new tokens of every prompt, and how many drafts were proposed and accepted in how
    many rounds."""
    llm.set_speculation(*candidate)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(work.rows, params, use_tqdm=False)
    metrics = [output.metrics for output in outputs]
    return (
        [output.outputs[0].token_ids for output in outputs],
        sum(each.num_draft_tokens for each in metrics),
        sum(each.num_accepted_tokens for each in metrics),
        sum(each.num_rounds for each in metrics),
    )


def measure(
    llm: LLM, candidates: Sequence[Candidate], works: Sequence[Workload], max_tokens: int
) -> list[dict[str, Any]]:
    """Return a row for every text and candidate."""
    rows = []
    with tqdm(total=len(works) * len(candidates), unit="run") as bar:
        for work in works:
            plain, *_ = complete(llm, (0, 0), work, max_tokens)
            for k, d in candidates:
                found, proposed, accepted, rounds = complete(llm, (k, d), work, max_tokens)
                rows.append(
                    {
                        "text": work.name,
                        "num_speculative_tokens": k,
                        "draft_loops": d,
                        "num_draft_tokens": proposed,
                        "draft_acceptance_rate": round(accepted / proposed, 4),
                        "mean_acceptance_length": round(1 + accepted / rounds, 3),
                        "identical_requests": sum(
                            a == b for a, b in zip(plain, found, strict=True)
                        ),
                        "requests": len(found),
                    }
                )
                bar.update()
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Lay the acceptance rates out: a line for each text and depth, a column for each K."""
    lengths = sorted({row["num_speculative_tokens"] for row in rows})
    rates: dict[tuple[str, int], dict[int, float]] = {}
    for row in rows:
        key = row["text"], row["draft_loops"]
        rates.setdefault(key, {})[row["num_speculative_tokens"]] = row["draft_acceptance_rate"]
    lines = [[text, d, *(f"{found[k]:.2f}" for k in lengths)] for (text, d), found in rates.items()]
    return markdown(["text", "d", *(f"K = {k}" for k in lengths)], lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--model", default="demo:ouro", help="default: %(default)s")
    add_workload_flag(parser)
    add("--draft-tokens", type=int, nargs="+", default=[1, 2, 4, 8], metavar="K")
    add("--draft-loops", type=int, nargs="+", metavar="d", help="default: all, 1 to D - 1")
    add("--prompts", type=int, default=24, help="of each text: %(default)s")
    add("--prompt-tokens", type=int, default=48, help="of each prompt: %(default)s")
    add("--max-tokens", type=int, default=64, help="of each completion: %(default)s")
    add("--threads", type=int, default=1, help="CPU threads: %(default)s")
    add("--json", type=Path, metavar="FILE", help="file to write the numbers to")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure everything, print the table, and return what the JSON file holds of it."""
    for name in ("prompts", "prompt_tokens", "threads"):
        check_int(f"--{name.replace('_', '-')}", getattr(args, name), 1)
    check_int("--max-tokens", args.max_tokens, 2)
    torch.set_num_threads(args.threads)
    llm = LLM(args.model, device="cpu", dtype="float32", num_threads=args.threads)
    depths = args.draft_loops or range(1, llm.full_loops)
    candidates = [(k, d) for d in depths for k in args.draft_tokens]
    for candidate in candidates:
        llm.set_speculation(*candidate)  # refuses what is out of range
    works = read_workloads(
        named_paths(args.workload),
        llm.get_tokenizer(),
        group=None,
        num_rows=args.prompts,
        num_tokens=args.prompt_tokens,
        min_rows=1,
    )
    rows = measure(llm, candidates, works, args.max_tokens)
    print(table(rows))
    return {
        "model": args.model,
        "full_loops": llm.full_loops,
        "prompts": args.prompts,
        "prompt_tokens": args.prompt_tokens,
        "max_tokens": args.max_tokens,
        "temperature": 0.0,
        "texts": {work.name: work.provenance for work in works},
        "machine": machine(llm),
        "results": rows,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    args = parse(argv)
    return run_command("benchmarks/acceptance.py", argv, args.json, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
