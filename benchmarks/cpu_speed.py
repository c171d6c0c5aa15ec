"""Decoding on the CPU: how near to the machine's limit, and what speculation gains at a given
acceptance.

One model with random weights, fp32. In one run, in turn: our plain decoding with linear layers as
they come, and as `cpu_linear="auto"` keeps them, for weights that bf16 holds (as published
checkpoints have) and for any fp32 weights; the official code with the same weights, for whoever has
it (--official), and the same work in the transformers library, where that is installed; then
speculation with drafts that are right with probability p, against plain decoding
and against what the times of the single stages predict.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cpu_model import CONFIG, Stages, StageTimes, bytes_per_token, random_model, read_bandwidth
from cpu_reference import Generate, llama_generate, official_generate
from results import markdown, run_command

from looped_spec import SamplingParams
from looped_spec.control.plan import Candidate
from looped_spec.control.static import StaticPolicy
from looped_spec.layers.native import BuildError, Kernels, use_kernels
from looped_spec.offline.machine import machine_facts
from looped_spec.offline.timing import in_turn
from looped_spec.runtime.attention.native import NativeBackend
from looped_spec.runtime.engine import Engine
from looped_spec.runtime.linears import arrange_linears
from looped_spec.testing.engine import make_engine
from looped_spec.testing.forced_acceptance import ForcedAcceptance

OFFICIAL = {1: 11.0, 8: 46.0}
"""Tokens per second of the official implementation's `generate` by batch size, recorded before on
a machine of this kind (2 cores, about 17.5 GB/s); not measured in this run."""
BF16, FP32, BEFORE = "auto, bf16 numbers", "auto, fp32 numbers", "plain"
NATIVE = "auto and native kernels, bf16 numbers"
LLAMA, OFFICIAL_CODE = "transformers", "official"
REFERENCES = (LLAMA, OFFICIAL_CODE)
LOOPS = int(CONFIG["total_ut_steps"])


def prompts_of(args: argparse.Namespace, batch_size: int) -> list[list[int]]:
    """Return the prompts of a batch; what they hold does not matter."""
    return [[1 + (row + i) % 100 for i in range(args.prompt)] for row in range(batch_size)]


def complete(
    engine: Engine, args: argparse.Namespace, batch_size: int, texts: list[list[int]] | None = None
) -> tuple[float, float]:
    """Return the seconds to complete a batch, and those of them behind the first tokens; add the
    new tokens of each request to `texts`."""
    params = [
        SamplingParams(max_tokens=args.tokens, ignore_eos=True, temperature=0.0, seed=row)
        for row in range(batch_size)
    ]
    start = time.perf_counter()
    requests = [
        engine.add_request(prompt, one)
        for prompt, one in zip(prompts_of(args, batch_size), params, strict=True)
    ]
    while not all(request.output_token_ids for request in requests):
        engine.step()
    first = time.perf_counter()
    while engine.has_work:
        engine.step()
    end = time.perf_counter()
    if texts is not None:
        texts += [request.output_token_ids for request in requests]
    return end - start, end - first


def engine_of(
    args: argparse.Namespace, *, as_bf16: bool, way: str, kernels: Kernels | None = None
) -> tuple[Engine, Any]:
    """Return an engine, and what became of its linear layers."""
    adapter = random_model(CONFIG, as_bf16=as_bf16)
    report = arrange_linears(adapter.module, way)
    use_kernels(adapter.module, kernels)
    engine = make_engine(
        ForcedAcceptance(adapter, args.acceptance),
        max_num_seqs=max(args.batch_sizes),
        max_model_len=args.prompt + args.tokens + 16,
        block_size=16,
        attention=None if kernels is None else NativeBackend(kernels),
    )
    return engine, report


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the least and the greatest."""
    return {
        "median": round(statistics.median(values), 4),
        "least": round(min(values), 4),
        "greatest": round(max(values), 4),
    }


def measure_plain(args: argparse.Namespace, ways: dict[str, Callable[[int], float]]) -> list[Any]:
    """Time all ways in turn at every batch size; ratios are taken repeat by repeat."""
    results = []
    for batch_size in args.batch_sizes:
        count = batch_size * args.tokens
        at_size = {way: partial(run, batch_size) for way, run in ways.items()}
        runs = in_turn(ways, partial(_call, at_size), args.repeats + 1)
        seconds = {way: each[1:] for way, each in runs.items()}  # the first warms up
        for way, each in seconds.items():
            rates = [count / one for one in each]
            row: dict[str, Any] = {
                "batch_size": batch_size,
                "way": way,
                "tokens_per_second": summary(rates),
            }
            for other in (BEFORE, *REFERENCES):
                if other in seconds and way != other and way not in REFERENCES:
                    ratios = [b / a for a, b in zip(each, seconds[other], strict=True)]
                    row[f"ratio_to_{other}"] = summary(ratios)
            if batch_size in OFFICIAL and way not in REFERENCES:
                row["ratio_to_recorded"] = round(statistics.median(rates) / OFFICIAL[batch_size], 2)
            results.append(row)
    return results


def _call(runs: Mapping[str, Callable[[], float]], way: str) -> float:
    return runs[way]()


def predicted_seconds(k: int, d: int, one: StageTimes, many: StageTimes) -> float:
    """Return the seconds of a round from those of its stages over B and over B (K + 1) rows."""
    if not k:
        return one.prelude + LOOPS * one.loop + one.readout
    drafts = (k + 1) * (one.prelude + d * one.loop) + k * one.readout
    return drafts + (LOOPS - d) * many.loop + many.readout


def measure_speculation(args: argparse.Namespace, engine: Engine, batch_size: int) -> list[Any]:
    """Compare each K with plain decoding, run by run and without the prompts, and with what the
    stages predict, which are timed after every turn of the runs."""
    adapter, p, d = engine.runner.adapter, args.acceptance, args.draft_loops
    stages = Stages(
        adapter, LOOPS, args.prompt + args.tokens // 2, batch_size, engine.runner.backend
    )
    single: list[StageTimes] = []
    wide: dict[int, list[StageTimes]] = {k: [] for k in args.draft_tokens}

    def run(k: int | None) -> tuple[float, int, float]:
        if k is None:
            single.append(stages.times(batch_size, 1, args.stage_repeats))
            for each, times in wide.items():
                times.append(stages.times(batch_size, each + 1, args.stage_repeats))
            return 0.0, 0, 0.0
        engine.policy = StaticPolicy(Candidate(k, d if k else 0))
        before = engine.metrics.num_rounds, engine.metrics.num_accepted_tokens
        _, seconds = complete(engine, args, batch_size)
        rounds = engine.metrics.num_rounds - before[0]
        accepted = (engine.metrics.num_accepted_tokens - before[1]) / max(rounds, 1)
        return seconds, rounds, 1 + accepted

    runs = in_turn([0, *args.draft_tokens, None], run, args.repeats + 1)
    one = StageTimes.median(single)
    results = []
    for k in args.draft_tokens:
        speedups = [a[0] / b[0] for a, b in zip(runs[0][1:], runs[k][1:], strict=True)]
        plain_seconds = predicted_seconds(0, 0, one, one)
        round_seconds = predicted_seconds(k, d, one, StageTimes.median(wide[k]))
        # Rounds are those of the run: some tens of tokens are few, and the last round overhangs.
        prediction = runs[0][-1][1] * plain_seconds / (runs[k][-1][1] * round_seconds)
        results.append(
            {
                "batch_size": batch_size,
                "K": k,
                "d": d,
                "speedup": summary(speedups),
                "predicted": round(prediction, 4),
                "measured_by_predicted": round(statistics.median(speedups) / prediction, 4),
                "rounds": runs[k][-1][1],
                "plain_rounds": runs[0][-1][1],
                "expected_tokens_per_round": round(sum(p**i for i in range(k + 1)), 3),
            }
        )
    return results


def measure_stages(args: argparse.Namespace, engine: Engine) -> dict[str, Any]:
    """Return the milliseconds of a loop pass over 1, 2, 4, 8 ... rows, as requests and as one
    request's rows, and what the rows cost by one row's."""
    runner = engine.runner
    stages = Stages(runner.adapter, LOOPS, args.prompt + args.tokens // 2, 32, runner.backend)
    sizes = (1, 2, 4, 8, 16, 32)
    loops: dict[str, list[float]] = {f"{n}": [] for n in sizes}
    for _ in range(3):
        for n in sizes:
            loops[f"{n}"].append(1e3 * stages.times(n, 1, args.stage_repeats).loop)
    ratios = [b / a for a, b in zip(loops["1"], loops["8"], strict=True)]
    verified = [1e3 * stages.times(1, n, args.stage_repeats).loop for n in (1, 8)]
    return {
        "loop_ms_by_requests": {n: summary(each) for n, each in loops.items()},
        "eight_rows_by_one": summary(ratios),
        "eight_rows_of_one_request_by_one": round(verified[1] / verified[0], 3),
    }


def reference_seconds(args: argparse.Namespace, generate: Generate, batch_size: int) -> float:
    """Return the seconds that other code takes for a batch."""
    start = time.perf_counter()
    made = generate(prompts_of(args, batch_size), args.tokens)
    seconds = time.perf_counter() - start
    assert [len(one) for one in made] == [args.tokens] * batch_size
    return seconds


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all of it and print the tables."""
    torch.set_num_threads(args.threads)
    before, _ = engine_of(args, as_bf16=True, way="plain")
    bf16, bf16_report = engine_of(args, as_bf16=True, way="auto")
    fp32, fp32_report = engine_of(args, as_bf16=False, way="auto")
    model_bytes = bytes_per_token(before.runner.adapter.adapter)  # type: ignore[attr-defined]
    bandwidth = [read_bandwidth(model_bytes)]
    engines = {BEFORE: before, FP32: fp32, BF16: bf16}
    try:
        kernels = Kernels()
    except BuildError as error:
        print(f"no native kernels: {error}", file=sys.stderr)
    else:
        engines[NATIVE], _ = engine_of(args, as_bf16=True, way="auto", kernels=kernels)
    ways: dict[str, Callable[[int], float]] = {
        way: lambda b, e=engine: complete(e, args, b)[0]  # type: ignore[misc]
        for way, engine in engines.items()
    }
    references = {LLAMA: llama_generate(CONFIG)}
    equal_texts = None
    if args.official is not None:
        adapter = random_model(CONFIG, as_bf16=True)
        official = official_generate(args.official, CONFIG, adapter)
        references[OFFICIAL_CODE] = official
        ours: list[list[int]] = []
        complete(before, args, max(args.batch_sizes), ours)
        theirs = official(prompts_of(args, len(ours)), args.tokens)
        equal_texts = sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)
    for name, generate in references.items():
        if generate is not None:
            ways[name] = partial(reference_seconds, args, generate)
    plain = measure_plain(args, ways)
    drafting = engines.get(NATIVE, bf16)
    speculation = [row for b in args.batch_sizes for row in measure_speculation(args, drafting, b)]
    stages = {way: measure_stages(args, engine) for way, engine in engines.items()}
    bandwidth.append(read_bandwidth(model_bytes))
    bound = model_bytes / max(bandwidth)
    rows: list[Sequence[Any]] = []
    for each in plain:
        rate = each["tokens_per_second"]
        share = bound / (each["batch_size"] / rate["median"])
        each["share_of_bound"] = round(share, 3)
        rows.append(
            (
                f"B={each['batch_size']}, {each['way']}",
                f"{rate['median']:.1f} ({rate['least']:.1f} to {rate['greatest']:.1f})",
                *(
                    each.get(f"ratio_to_{other}", {}).get("median", "-")
                    for other in (BEFORE, LLAMA, OFFICIAL_CODE)
                ),
                each.get("ratio_to_recorded", "-"),
                f"{share:.2f}",
            )
        )
    heads = ("plain decoding", "tokens/s", "by plain linears", "by transformers", "by official")
    print(markdown((*heads, "by official, recorded", "of the bound"), rows))
    if equal_texts is not None:
        print(f"\ngreedy texts of the official code that equal ours: {100 * equal_texts:.0f} %")
    print(
        f"\nbound: {model_bytes / 1e6:.0f} MB of fp32 weights a token at "
        f"{max(bandwidth) / 1e9:.1f} GB/s are {1e3 * bound:.1f} ms\n"
    )
    print(
        markdown(
            (f"drafts right with p={args.acceptance}", "speed-up", "predicted", "measured by it"),
            [
                (
                    f"B={s['batch_size']}, K={s['K']}, d={s['d']}",
                    f"{s['speedup']['median']:.2f} ({s['speedup']['least']:.2f} to "
                    f"{s['speedup']['greatest']:.2f})",
                    f"{s['predicted']:.2f}",
                    f"{s['measured_by_predicted']:.2f}",
                )
                for s in speculation
            ],
        )
    )
    for way, each in stages.items():
        print(f"loop pass over 8 rows by one over 1 row, {way}: {each['eight_rows_by_one']}")
    return {
        "machine": machine_facts(torch.device("cpu")),
        "config": CONFIG,
        "bytes_per_token": model_bytes,
        "bandwidth_bytes_per_second": [round(each) for each in bandwidth],
        "bound_ms": round(1e3 * bound, 3),
        "linears": {BF16: bf16_report.as_dict(), FP32: fp32_report.as_dict()},
        "official_equal_texts": equal_texts,
        "official_recorded": {f"{b}": rate for b, rate in OFFICIAL.items()},
        "plain": plain,
        "speculation_with": NATIVE if NATIVE in engines else BF16,
        "speculation": speculation,
        "stages": stages,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the tables, keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8], metavar="B")
    parser.add_argument("--prompt", type=int, default=32, help="prompt tokens: %(default)s")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--stage-repeats", type=int, default=15, help="default: %(default)s")
    parser.add_argument("--acceptance", type=float, default=0.9, help="p, default: %(default)s")
    parser.add_argument("--draft-loops", type=int, default=1, help="d, default: %(default)s")
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[2, 4, 6, 8], metavar="K")
    parser.add_argument(
        "--official",
        type=Path,
        metavar="FOLDER",
        help="the official code of the family (its Python files as they come with a checkpoint), "
        "to be measured beside; it is run. Needs transformers 4.56.2 to 4.57.6",
    )
    parser.add_argument("--json", type=Path, help="where to keep the numbers")
    args = parser.parse_args(argv)
    return run_command("benchmarks/cpu_speed.py", argv, args.json, lambda: measure(args))


if __name__ == "__main__":
    sys.exit(main())
