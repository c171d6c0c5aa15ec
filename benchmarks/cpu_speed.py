"""Decoding on the CPU: how near to the machine's limit, and what speculation gains at a given
acceptance.

One model with random weights, fp32. In one run, in turn: our plain decoding with linear layers as
they come, and as `cpu_linear="auto"` keeps them, for weights that bf16 holds (as published
checkpoints have) and for any fp32 weights; the official code with the same weights, for whoever has
it (--official), and the same work in the transformers library, where that is installed; then
speculation with drafts that are right with probability p, against plain decoding
and against what the times of the single stages predict.

With --json every turn is in the file as soon as it was measured, and --resume goes on with what a
run that was stopped has left there.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cpu_model import CONFIG, Stages, bytes_per_token, random_model, read_bandwidth
from cpu_reference import Generate, llama_generate, official_generate
from cpu_report import (
    BEFORE,
    BF16,
    FP32,
    LLAMA,
    NATIVE,
    NATIVE_FP32,
    OFFICIAL,
    OFFICIAL_CODE,
    plain_rows,
    print_tables,
    speculation_rows,
    stage_rows,
)
from kept_parts import KeptParts, Part
from results import run_command, shown_command

from looped_spec import SamplingParams
from looped_spec.control.plan import Candidate
from looped_spec.control.static import StaticPolicy
from looped_spec.layers.native import BuildError, Kernels, use_kernels
from looped_spec.offline.machine import machine_facts
from looped_spec.offline.timing import in_turn
from looped_spec.runtime.attention.native import NativeBackend
from looped_spec.runtime.engine import Engine
from looped_spec.runtime.linears import LinearReport, arrange_linears
from looped_spec.testing.engine import make_engine
from looped_spec.testing.forced_acceptance import ForcedAcceptance

LOOPS = int(CONFIG["total_ut_steps"])
STAGE_ROWS = (1, 2, 4, 8, 16, 32)


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
) -> tuple[Engine, LinearReport]:
    """Return an engine, and what became of its linear layers."""
    adapter = random_model(CONFIG, as_bf16=as_bf16)
    report = arrange_linears(adapter.module, way, use_native=kernels is not None)
    use_kernels(adapter.module, kernels)
    engine = make_engine(
        ForcedAcceptance(adapter, args.acceptance),
        max_num_seqs=max(args.batch_sizes),
        max_model_len=args.prompt + args.tokens + 16,
        block_size=16,
        attention=None if kernels is None else NativeBackend(kernels),
    )
    return engine, report


def reference_seconds(args: argparse.Namespace, generate: Generate, batch_size: int) -> float:
    """Return the seconds that other code takes for a batch."""
    start = time.perf_counter()
    made = generate(prompts_of(args, batch_size), args.tokens)
    seconds = time.perf_counter() - start
    assert [len(one) for one in made] == [args.tokens] * batch_size
    return seconds


class Bench:
    """The engines, and what measures the parts with them."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Make the models; nothing is timed yet."""
        self.args = args
        self.engines: dict[str, Engine] = {}
        self.linears: dict[str, LinearReport] = {}
        self.engines[BEFORE], _ = engine_of(args, as_bf16=True, way="plain")
        self.engines[FP32], self.linears[FP32] = engine_of(args, as_bf16=False, way="auto")
        self.engines[BF16], self.linears[BF16] = engine_of(args, as_bf16=True, way="auto")
        try:
            kernels = Kernels()
        except BuildError as error:
            print(f"no native kernels: {error}", file=sys.stderr)
        else:
            self._add_native(NATIVE, kernels, as_bf16=True)
            self._add_native(NATIVE_FP32, kernels, as_bf16=False)
        self.drafting = NATIVE if NATIVE in self.engines else BF16
        self.ways: dict[str, Callable[[int], float]] = {
            way: lambda b, e=engine: complete(e, args, b)[0]  # type: ignore[misc]
            for way, engine in self.engines.items()
        }
        self.references: dict[str, Generate] = {}
        if (llama := llama_generate(CONFIG)) is not None:
            self.references[LLAMA] = llama
        if args.official is not None:
            adapter = random_model(CONFIG, as_bf16=True)
            self.references[OFFICIAL_CODE] = official_generate(args.official, CONFIG, adapter)
        for name, generate in self.references.items():
            self.ways[name] = partial(reference_seconds, args, generate)
        self.bytes_per_token = bytes_per_token(random_model(CONFIG, as_bf16=True))
        self._warm: set[str] = set()

    def _add_native(self, way: str, kernels: Kernels, *, as_bf16: bool) -> None:
        self.engines[way], self.linears[way] = engine_of(
            self.args, as_bf16=as_bf16, way="auto", kernels=kernels
        )

    def parts(self) -> dict[str, tuple[float, Callable[[], Part]]]:
        """Return what measures each part, and about how long it takes (in milliseconds)."""
        args = self.args
        work: dict[str, tuple[float, Callable[[], Part]]] = {
            "bandwidth, before": (1500, self._bandwidth)
        }
        if OFFICIAL_CODE in self.references:
            work["equal texts"] = (7000, self._equal_texts)
        turn_ms = {b: 50 * (1.5 if b > 1 else 1) * args.tokens for b in args.batch_sizes}
        for batch_size in args.batch_sizes:
            for turn in range(args.repeats):
                work[f"plain decoding, B={batch_size}, turn {turn}"] = (
                    len(self.ways) * turn_ms[batch_size],
                    partial(self._plain, batch_size, turn),
                )
        for batch_size in args.batch_sizes:
            for turn in range(args.repeats):
                work[f"speculation, B={batch_size}, turn {turn}"] = (
                    len(args.draft_tokens) * turn_ms[batch_size] * 1.2,
                    partial(self._speculation, batch_size, turn),
                )
        for way in self.engines:
            work[f"stages, {way}"] = (
                3 * 4 * (args.stage_repeats + 2) * 60,
                partial(self._stages, way),
            )
        work["bandwidth, after"] = (1500, self._bandwidth)
        return work

    def summarize(self, parts: Mapping[str, Part]) -> dict[str, Any]:
        """Return the document of the parts so far."""
        args = self.args
        names = ("bandwidth, before", "bandwidth, after")
        bandwidth = [parts[name]["bytes_per_second"] for name in names if name in parts]
        bound = self.bytes_per_token / max(bandwidth) if bandwidth else 0.0
        return {
            "machine": machine_facts(torch.device("cpu")),
            "config": CONFIG,
            "bytes_per_token": self.bytes_per_token,
            "bandwidth_bytes_per_second": bandwidth,
            "bound_ms": round(1e3 * bound, 3),
            "linears": {way: report.as_dict() for way, report in self.linears.items()},
            "official_equal_texts": parts.get("equal texts"),
            "official_recorded": {f"{b}": rate for b, rate in OFFICIAL.items()},
            "plain": plain_rows(parts, args.batch_sizes, args.tokens, bound),
            "speculation_with": self.drafting,
            "speculation": speculation_rows(
                parts,
                args.batch_sizes,
                args.draft_tokens,
                args.draft_loops,
                LOOPS,
                args.acceptance,
            ),
            "stages": stage_rows(parts, list(self.engines)),
        }

    def _bandwidth(self) -> Part:
        return {"bytes_per_second": round(read_bandwidth(self.bytes_per_token))}

    def _equal_texts(self) -> Part:
        """Tell for each way with the numbers of the official code, which share of its greedy texts
        equals the official ones. The tokens are the model's own here, nothing is forced."""
        args = self.args
        num_texts = max(args.batch_sizes)
        theirs = self.references[OFFICIAL_CODE](prompts_of(args, num_texts), args.tokens)
        shares: dict[str, float] = {}
        for way in (BEFORE, BF16, NATIVE):
            if way not in self.engines:
                continue
            ours: list[list[int]] = []
            runner = self.engines[way].runner
            assert isinstance(runner.adapter, ForcedAcceptance)
            engine = make_engine(
                runner.adapter.adapter,
                max_num_seqs=num_texts,
                max_model_len=args.prompt + args.tokens,
                block_size=16,
                attention=runner.backend,
            )
            complete(engine, args, num_texts, ours)
            shares[way] = sum(a == b for a, b in zip(ours, theirs, strict=True)) / num_texts
        return shares

    def _warmed(self, kind: str, run: Callable[[], Part]) -> Part:
        """Run once more before the first of a kind in this process."""
        if kind not in self._warm:
            run()
            self._warm.add(kind)
        return run()

    def _plain(self, batch_size: int, turn: int) -> Part:
        """Return the milliseconds of each way."""
        order = list(self.ways)[:: -1 if turn % 2 else 1]

        def run() -> Part:
            seconds = in_turn(order, lambda way: self.ways[way](batch_size), 1)
            return {way: 1e3 * seconds[way][0] for way in self.ways}

        return self._warmed(f"plain {batch_size}", run)

    def _speculation(self, batch_size: int, turn: int) -> Part:
        """Return the milliseconds and rounds of plain decoding ("0") and of each K, without the
        prompts, and the stages of each, timed behind them."""
        args, engine = self.args, self.engines[self.drafting]
        counts = [0, *args.draft_tokens]
        runner = engine.runner
        stages = Stages(
            runner.adapter, LOOPS, args.prompt + args.tokens // 2, batch_size, runner.backend
        )

        def run_one(k: int) -> dict[str, Any]:
            engine.policy = StaticPolicy(Candidate(k, args.draft_loops if k else 0))
            before = engine.metrics.num_rounds
            _, seconds = complete(engine, args, batch_size)
            return {"ms": 1e3 * seconds, "rounds": engine.metrics.num_rounds - before}

        def run() -> Part:
            runs = in_turn(counts[:: -1 if turn % 2 else 1], run_one, 1)
            return {
                "runs": {str(k): runs[k][0] for k in counts},
                "stages": {
                    str(k): stages.times(batch_size, k + 1, args.stage_repeats).milliseconds()
                    for k in counts
                },
            }

        try:
            return self._warmed(f"speculation {batch_size}", run)
        finally:
            engine.policy = StaticPolicy(Candidate(0, 0))

    def _stages(self, way: str) -> Part:
        """Return the milliseconds of a loop pass over rows of as many requests, three times, and
        over rows of a single one."""
        args, runner = self.args, self.engines[way].runner
        stages = Stages(
            runner.adapter,
            LOOPS,
            args.prompt + args.tokens // 2,
            max(STAGE_ROWS),
            runner.backend,
        )
        loops: dict[str, list[float]] = {f"{n}": [] for n in STAGE_ROWS}
        for _ in range(3):
            for n in STAGE_ROWS:
                loops[f"{n}"].append(1e3 * stages.times(n, 1, args.stage_repeats).loop)
        one = {f"{n}": 1e3 * stages.times(1, n, args.stage_repeats).loop for n in (1, 8)}
        return {"loop_ms": loops, "loop_ms_of_one_request": one}


def settings_of(args: argparse.Namespace, bench: Bench) -> dict[str, Any]:
    """Return what all parts share, without the names of this machine's folders."""
    own = {key: value for key, value in vars(args).items() if key not in ("json", "resume")}
    return own | {
        "official": args.official is not None,
        "ways": list(bench.ways),
        "config": CONFIG,
        "torch": torch.__version__,
    }


def measure(args: argparse.Namespace, command: list[str]) -> dict[str, Any]:
    """Run all of it and print the tables."""
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        bench = Bench(args)
        kept = KeptParts(
            args.json,
            settings_of(args, bench),
            {
                "command": command,
                "machine": machine_facts(torch.device("cpu")),
                "linears": {way: dict(report.ways) for way, report in bench.linears.items()},
            },
            bench.summarize,
            resume=args.resume,
        )
        document = kept.measure(bench.parts())
    finally:
        torch.set_num_threads(threads)
    print_tables(document, args.acceptance)
    return document


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
    parser.add_argument("--json", type=Path, help="where to keep the numbers, turn by turn")
    parser.add_argument(
        "--resume", action="store_true", help="go on with the numbers that --json has already"
    )
    args = parser.parse_args(argv)
    name, left = "benchmarks/cpu_speed.py", "nothing is kept without --json"
    if args.json is not None:
        left = f"what was measured is in '{args.json}', --resume goes on with it"
    return run_command(
        name, argv, args.json, lambda: measure(args, shown_command(name, argv)), left
    )


if __name__ == "__main__":
    sys.exit(main())
