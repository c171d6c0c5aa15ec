"""How often text depends on the shape of the batch: every (B, K, d) against plain decoding.

In exact arithmetic all greedy texts of a prompt are one. In bfloat16 the same row gives other bits
in a batch of another shape, and where the two best tokens nearly tie, another token. Reported are,
for each setting, how many requests equal plain decoding of the same batch size and plain decoding
of one request at a time, where the others differ first, and the margin there: how far the best
token's logit stands above the second's in fp32, with the weights rounded as the model ran. Nothing
is timed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from demo import PROMPTS
from results import add_workload_flag, markdown, run_command
from torch import Tensor
from tqdm import tqdm

from looped_spec import LLM, SamplingParams
from looped_spec.errors import check_int
from looped_spec.loading import load_adapter
from looped_spec.offline.machine import machine
from looped_spec.offline.timing import run_prompts
from looped_spec.offline.workloads import named_paths, read_workloads
from looped_spec.testing.stages import StageBench

Texts = list[list[int]]
PLAIN = (0, 0)


@dataclass(frozen=True)
class Difference:
    """Where a text leaves plain decoding, and how near that was.

    Attributes:
        request: number of the prompt.
        position: of the first other token, among the new ones, from 0.
        margin: fp32 logit of the best token less that of the second, at this position.
        both_best: whether the two tokens are those two.
    """

    request: int
    position: int
    margin: float
    both_best: bool


class ExactLogits:
    """Logits in fp32 over texts that are given, with the weights of a model rounded to a dtype."""

    def __init__(self, model: str, full_loops: int, dtype: torch.dtype, device: str) -> None:
        loaded = load_adapter(model, dtype="float32", device=device)
        with torch.no_grad():
            for parameter in loaded.adapter.module.parameters():
                parameter.copy_(parameter.to(dtype))
        self._adapter, self._loops, self._device = loaded.adapter, full_loops, str(loaded.device)
        self._known: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def best_two(self, prompt: Sequence[int], text: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return margins [N] and the two best tokens [N, 2] at the N positions of a text."""
        ids = (*prompt, *text)
        if ids not in self._known:
            bench = StageBench(
                self._adapter,
                full_loops=self._loops,
                num_tokens=len(ids),
                device=self._device,
            )
            logits = bench.logits(torch.tensor([ids]))[0, len(prompt) - 1 : -1]
            values, tokens = logits.topk(2)
            self._known[ids] = (values[:, 0] - values[:, 1]).cpu(), tokens.cpu()
        return self._known[ids]


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first position at which two texts of one length differ."""
    pairs = enumerate(zip(one, other, strict=True))
    return next((position for position, (a, b) in pairs if a != b), None)


def complete(llm: LLM, candidate: tuple[int, int], batch: int, prompts: Texts, new: int) -> Texts:
    """Complete all prompts greedily, `batch` at a time, with (K, d)."""
    llm.set_speculation(*candidate)
    params = [SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)] * len(prompts)
    run = run_prompts(llm, prompts, params, batch_size=batch)
    return [output.token_ids for output in run.outputs]


def differences(plain: Texts, found: Texts, prompts: Texts, exact: ExactLogits) -> list[Difference]:
    """Compare texts with those of plain decoding, of the same lengths."""
    left = []
    for request, (expected, got) in enumerate(zip(plain, found, strict=True)):
        position = first_difference(expected, got)
        if position is not None:
            margins, tokens = exact.best_two(prompts[request], expected)
            both = {expected[position], got[position]} == set(tokens[position].tolist())
            left.append(Difference(request, position, round(float(margins[position]), 6), both))
    return left


def measure(
    llm: LLM,
    prompts: Texts,
    exact: ExactLogits,
    *,
    batch_sizes: Sequence[int],
    candidates: Sequence[tuple[int, int]],
    max_tokens: int,
) -> tuple[list[dict[str, Any]], Texts]:
    """Return a row for every (B, K, d), and the texts of plain decoding one request at a time."""
    alone = complete(llm, PLAIN, 1, prompts, max_tokens)
    settings = list(itertools.product(batch_sizes, [PLAIN, *candidates]))
    rows, plain = [], alone
    for batch, candidate in tqdm(settings, unit="run"):
        found = complete(llm, candidate, batch, prompts, max_tokens)
        if candidate == PLAIN:
            plain = found
        left = differences(plain, found, prompts, exact)
        rows.append(
            {
                "batch_size": batch,
                "num_speculative_tokens": candidate[0],
                "draft_loops": candidate[1],
                "requests": len(prompts),
                "equal_to_plain": len(prompts) - len(left),
                "equal_to_plain_alone": sum(a == b for a, b in zip(alone, found, strict=True)),
                "differences": [asdict(one) for one in left],
            }
        )
    return rows, alone


def all_margins(plain: Texts, prompts: Texts, exact: ExactLogits) -> dict[str, float]:
    """Describe the margins at all positions, for comparison with those where texts differ."""
    parts = [exact.best_two(prompt, text)[0] for prompt, text in zip(prompts, plain, strict=True)]
    margins = torch.cat(parts)
    return {
        "positions": len(margins),
        "median": round(float(margins.median()), 4),
        "percentile_1": round(float(margins.quantile(0.01)), 4),
        "least": round(float(margins.min()), 6),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Lay the rows out."""
    heads = (
        *("setting", "equal to plain, same B", "equal to plain, B = 1"),
        *("first difference, median (least)", "margin there, median (greatest)"),
        "both tokens the best two",
    )
    lines = []
    for row in rows:
        k, d = row["num_speculative_tokens"], row["draft_loops"]
        setting = f"{row['dtype']}, B = {row['batch_size']}, " + (
            f"K = {k}, d = {d}" if k else "plain"
        )
        left = row["differences"]
        where = [one["position"] for one in left]
        margins = [one["margin"] for one in left]
        lines.append(
            (
                setting,
                f"{row['equal_to_plain']} of {row['requests']}" if k else "-",
                f"{row['equal_to_plain_alone']} of {row['requests']}",
                f"{statistics.median(where):g} ({min(where)})" if left else "-",
                f"{statistics.median(margins):.4f} ({max(margins):.4f})" if left else "-",
                f"{sum(one['both_best'] for one in left)} of {len(left)}" if left else "-",
            )
        )
    return markdown(heads, lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--model", default="demo:ouro", help="default: %(default)s")
    add("--device", default="auto", help="default: %(default)s")
    add("--dtypes", nargs="+", default=["bfloat16", "float32"], metavar="DTYPE")
    add("--attention-backend", default="auto", help="default: %(default)s")
    add("--attention-num-splits", type=int, default=0, help="default: %(default)s")
    add_workload_flag(parser)
    add("--prompts", type=int, default=8, help="of each text: %(default)s")
    add("--prompt-tokens", type=int, default=32, help="of each prompt: %(default)s")
    add("--batch-sizes", type=int, nargs="+", default=[1, 8], metavar="B")
    add("--draft-tokens", type=int, nargs="+", default=[1, 2, 4], metavar="K")
    add("--draft-loops", type=int, nargs="+", default=[1, 2], metavar="d")
    add("--max-tokens", type=int, default=64, help="of each completion: %(default)s")
    add("--threads", type=int, default=1, help="CPU threads: %(default)s")
    add("--json", type=Path, metavar="FILE", help="file to write the numbers to")
    return parser.parse_args(argv)


def read_prompts(args: argparse.Namespace, llm: LLM) -> Texts:
    """Return the prompts of the texts that were named, else those of the examples."""
    tokenizer = llm.get_tokenizer()
    if args.workload:
        works = read_workloads(
            named_paths(args.workload),
            tokenizer,
            group=None,
            num_rows=args.prompts,
            num_tokens=args.prompt_tokens,
            min_rows=1,
        )
        return [row for work in works for row in work.rows]
    lines = PROMPTS.read_text().splitlines()[: args.prompts]
    return [tokenizer.encode(json.loads(line)["prompt"]) for line in lines]


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure everything, print the table, and return what the JSON file holds of it."""
    for name in ("prompts", "prompt_tokens", "threads", "max_tokens"):
        check_int(f"--{name.replace('_', '-')}", getattr(args, name), 1)
    for size in args.batch_sizes:
        check_int("--batch-sizes", size, 1)
    torch.set_num_threads(args.threads)
    candidates = [(k, d) for d in args.draft_loops for k in args.draft_tokens]
    rows: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    for dtype in args.dtypes:
        llm = LLM(
            args.model,
            device=args.device,
            dtype=dtype,
            num_threads=args.threads,
            max_num_seqs=max(args.batch_sizes),
            attention_backend=args.attention_backend,
            attention_num_splits=args.attention_num_splits,
        )
        prompts = read_prompts(args, llm)
        exact = ExactLogits(args.model, llm.full_loops, llm.loaded.dtype, args.device)
        found, alone = measure(
            llm,
            prompts,
            exact,
            batch_sizes=args.batch_sizes,
            candidates=candidates,
            max_tokens=args.max_tokens,
        )
        rows += [{"dtype": dtype, **row} for row in found]
        facts[dtype] = {
            "attention_backend": llm.engine.runner.backend.description,
            "margins": all_margins(alone, prompts, exact),
            "machine": machine(llm),
        }
    print(table(rows))
    for dtype, fact in facts.items():
        print(f"\n{dtype}, all positions of plain decoding: {fact['margins']}", file=sys.stderr)
    return {
        "model": args.model,
        "prompts": len(prompts),
        "max_tokens": args.max_tokens,
        "temperature": 0.0,
        "dtypes": facts,
        "results": rows,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    args = parse(argv)
    return run_command("benchmarks/divergence.py", argv, args.json, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
