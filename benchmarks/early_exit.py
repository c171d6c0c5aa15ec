"""Early exit on a demo: loss and loops per token at several thresholds, and tokens per second.

Beside the thresholds stand fixed depths: every token behind the prompt leaves after the same loop.
A criterion is worth its score only where it has a lower loss than a fixed depth of as many loops.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from exit_quality import Quality, follow, summarize
from results import add_workload_flag, markdown, run_command
from tqdm import tqdm

from looped_spec import LLM, ModelAdapter, SamplingParams
from looped_spec.errors import ConfigError, UnsupportedError, check_int, closest
from looped_spec.offline.machine import machine
from looped_spec.offline.workloads import Workload, named_paths, read_workloads
from looped_spec.runtime.early_exit import ExitRule

Setting = tuple[str, float]
"""A criterion and its threshold; FULL or FIXED and a number of loops."""
FULL = "full depth"
FIXED = "fixed depth"


def rules(exits: Sequence[Setting], loops: int) -> dict[Setting, ExitRule]:
    """Return the exit rules to compare; full depth comes first."""
    full = ExitRule(exits[0][0], math.inf, 1, loops)
    found: dict[Setting, ExitRule] = {(FULL, float(loops)): full}
    for depth in range(1, loops):
        found[FIXED, float(depth)] = replace(full, threshold=-math.inf, min_loops=depth)
    for criterion, threshold in exits:
        found[criterion, threshold] = ExitRule(criterion, threshold, 1, loops)
    return found


def read_exits(llm: LLM, given: Sequence[Sequence[str]]) -> list[Setting]:
    """Return the settings that the command line names, each a criterion and its thresholds."""
    known = [criterion.name for criterion in llm.loaded.adapter.capabilities.early_exit]
    if not known:
        raise UnsupportedError(f"{llm.loaded.name} declares no signal for early exit")
    found = []
    for criterion, *thresholds in given:
        if criterion not in known:
            raise ConfigError(
                f"the criterion of --exit must be one of {', '.join(known)}, "
                f"got '{criterion}'{closest(criterion, known)}"
            )
        for threshold in thresholds:
            try:
                found.append((criterion, float(threshold)))
            except ValueError:
                raise ConfigError(
                    f"a threshold of --exit must be a number, got '{threshold}'"
                ) from None
    if not found:
        raise ConfigError("--exit needs a criterion and at least one threshold")
    return found


def quality(
    adapter: ModelAdapter,
    works: Sequence[Workload],
    prompt_tokens: int,
    wanted: dict[Setting, ExitRule],
) -> dict[Setting, Quality]:
    """Measure every rule on all texts together."""
    rows = [torch.tensor(work.rows) for work in works]
    steps = sum(each.shape[1] - prompt_tokens - 1 for each in rows)
    expected: list[torch.Tensor] = []
    found = {}
    with tqdm(total=steps * len(wanted), unit="step", desc="quality") as bar:
        for name, rule in wanted.items():
            parts = [follow(adapter, each, prompt_tokens, rule, bar.update) for each in rows]
            expected = expected or [choices for _, _, choices in parts]
            found[name] = summarize(parts, expected, rule.max_loops)
    return found


def speed(
    model: str,
    works: Sequence[Workload],
    prompt_tokens: int,
    settings: dict[Setting, dict[str, Any]],
    args: argparse.Namespace,
) -> dict[Setting, dict[str, Any]]:
    """Time completions with every setting of `LLM`, in turn, `args.repeats` times."""
    prompts = [row[:prompt_tokens] for work in works for row in work.rows[: args.timed_prompts]]
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0.0, ignore_eos=True)
    llms = {
        name: LLM(
            model,
            device="cpu",
            dtype="float32",
            num_threads=args.threads,
            num_speculative_tokens=0,
            max_num_seqs=args.batch_size,
            max_model_len=prompt_tokens + args.max_tokens,
            **options,
        )
        for name, options in settings.items()
    }
    rates: dict[Setting, list[float]] = {name: [] for name in llms}
    loops: dict[Setting, float] = {}
    for llm in llms.values():
        llm.generate(prompts[:1], replace(params, max_tokens=8), use_tqdm=False)  # warm-up
    with tqdm(total=args.repeats * len(llms), unit="run", desc="speed") as bar:
        for repeat in range(args.repeats):
            names = list(llms) if repeat % 2 == 0 else list(reversed(llms))
            for name in names:
                start = time.perf_counter()
                outputs = llms[name].generate(prompts, params, use_tqdm=False)
                seconds = time.perf_counter() - start
                rates[name].append(sum(len(o.outputs[0].token_ids) for o in outputs) / seconds)
                rounds = sum(output.metrics.num_rounds for output in outputs)
                loops[name] = sum(output.metrics.num_loop_rows for output in outputs) / rounds
                bar.update()
    return {
        name: {
            "tokens_per_second": round(statistics.median(found), 1),
            "tokens_per_second_least": round(min(found), 1),
            "tokens_per_second_greatest": round(max(found), 1),
            "loops_per_token_written": round(loops[name], 3),
        }
        for name, found in rates.items()
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Lay the numbers out, one setting a row."""
    heads, keys = ["setting", "threshold"], list[tuple[str, str]]()
    if "loss" in rows[0]:
        heads += ["loops per token", "loss", "agrees with full depth"]
        keys += [("mean_loops", ".2f"), ("loss", ".3f"), ("agreement", ".3f")]
    if "tokens_per_second" in rows[0]:
        heads += ["loops per token written", "tokens/s, median", "least", "greatest"]
        keys += [("loops_per_token_written", ".2f")]
        keys += [(f"tokens_per_second{end}", ".0f") for end in ("", "_least", "_greatest")]
    lines = []
    for row in rows:
        numbers = [format(row[key], style) if key in row else "" for key, style in keys]
        lines.append([row["criterion"], f"{row['threshold']:g}", *numbers])
    return markdown(heads, lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--model", default="demo:ouro", help="default: %(default)s")
    add(
        "--exit",
        nargs="+",
        action="append",
        required=True,
        metavar=("CRITERION", "t"),
        help="a criterion and thresholds for it; may be given again",
    )
    add_workload_flag(parser)
    add("--rows", type=int, default=48, help="of each text, 0 measures no loss: %(default)s")
    add("--prompt-tokens", type=int, default=32, help="of each row, at full depth: %(default)s")
    add("--row-tokens", type=int, default=160, help="of each row in all: %(default)s")
    timing = parser.add_argument_group("speed, of completions of the same prompts")
    timing.add_argument("--repeats", type=int, default=0, help="0 times nothing: %(default)s")
    timing.add_argument("--timed-prompts", type=int, default=4, help="of each text: %(default)s")
    timing.add_argument("--max-tokens", type=int, default=64, help="of each: %(default)s")
    timing.add_argument("--batch-size", type=int, default=1, help="requests at once: %(default)s")
    add("--threads", type=int, default=1, help="CPU threads: %(default)s")
    add("--json", type=Path, metavar="FILE", help="file to write the numbers to")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure everything, print the table, and return what the JSON file holds of it."""
    for name in ("prompt_tokens", "timed_prompts", "max_tokens", "batch_size", "threads"):
        check_int(f"--{name.replace('_', '-')}", getattr(args, name), 1)
    check_int("--rows", args.rows, 0)
    check_int("--row-tokens", args.row_tokens, args.prompt_tokens + 2)
    check_int("--repeats", args.repeats, 0)
    torch.set_num_threads(args.threads)
    llm = LLM(
        args.model,
        device="cpu",
        dtype="float32",
        num_threads=args.threads,
        max_num_seqs=1,
        num_speculative_tokens=0,
    )
    adapter, loops = llm.loaded.adapter, llm.full_loops
    exits = read_exits(llm, args.exit)
    num_rows = max(args.rows, args.timed_prompts if args.repeats else 0)
    works = read_workloads(
        named_paths(args.workload),
        llm.get_tokenizer(),
        group=None,
        num_rows=max(num_rows, 1),
        num_tokens=args.row_tokens,
        min_rows=1,
    )
    found: dict[Setting, dict[str, Any]] = {}
    if args.rows:
        texts = [replace(work, rows=work.rows[: args.rows]) for work in works]
        measured = quality(adapter, texts, args.prompt_tokens, rules(exits, loops))
        found = {setting: asdict(result) for setting, result in measured.items()}
    if args.repeats:
        options: dict[Setting, dict[str, Any]] = {(FULL, float(loops)): {}}
        for criterion, threshold in exits:
            options[criterion, threshold] = {
                "exit_criterion": criterion,
                "exit_threshold": threshold,
            }
        for setting, timed in speed(args.model, works, args.prompt_tokens, options, args).items():
            found[setting] = found.get(setting, {}) | timed
    if not found:
        raise ConfigError("nothing to measure: --rows and --repeats are both 0")
    rows = [{"criterion": c, "threshold": t, **numbers} for (c, t), numbers in found.items()]
    print(table(rows))
    return {
        "model": args.model,
        "full_loops": loops,
        "rows": args.rows,
        "row_tokens": args.row_tokens,
        "prompt_tokens": args.prompt_tokens,
        "timed": {
            "repeats": args.repeats,
            "prompts": args.timed_prompts * len(works),
            "max_tokens": args.max_tokens,
            "batch_size": args.batch_size,
        },
        "texts": {work.name: work.provenance for work in works},
        "machine": machine(llm),
        "results": rows,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    args = parse(argv)
    return run_command("benchmarks/early_exit.py", argv, args.json, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
