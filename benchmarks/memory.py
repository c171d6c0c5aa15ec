"""Memory on the CPU: the peak by weights and cache, and whether thousands of rounds make it grow.

The process is measured from outside: resident memory before the model was made, right after, at
its peak, and over rounds of requests that come and go. What torch and Python take before there is
a model is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from cpu_model import CONFIG, random_model
from results import markdown, run_command

from looped_spec import SamplingParams
from looped_spec.control.plan import Candidate
from looped_spec.control.static import StaticPolicy
from looped_spec.errors import UnsupportedError
from looped_spec.layers.native import BuildError, Kernels, use_kernels
from looped_spec.offline.machine import machine_facts
from looped_spec.runtime.attention.native import NativeBackend
from looped_spec.runtime.engine import Engine
from looped_spec.runtime.freed_memory import return_freed_memory
from looped_spec.runtime.linears import arrange_linears
from looped_spec.testing.engine import make_engine
from looped_spec.testing.forced_acceptance import ForcedAcceptance

SMALL = CONFIG | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "head_dim": 8,
    "vocab_size": 512,
    "num_hidden_layers": 1,
    "total_ut_steps": 3,
}


def resident(peak: bool = False) -> int:
    """Return the bytes of memory that this process holds now, or held at most."""
    field = "VmHWM" if peak else "VmRSS"
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError as error:
        raise UnsupportedError("the memory of a process can be read on Linux alone") from error
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def reset_peak() -> None:
    """Let the peak start anew at what is held now; where that is forbidden the old peak counts."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def run_rounds(engine: Engine, rounds: int, batch_size: int, seed: int = 0) -> None:
    """Run so many rounds with a full batch, in which requests come and go."""
    until = engine.metrics.num_rounds + rounds
    while engine.metrics.num_rounds < until:
        while len(engine.scheduler.running) + len(engine.scheduler.waiting) < batch_size:
            seed += 1
            length = 8 + seed % 40
            params = SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.7, seed=seed)
            engine.add_request([1 + seed % 50] * length, params)
        engine.step()


def weight_bytes(module: torch.nn.Module, packed_saves: int) -> int:
    """Return the bytes of all weights, less what packing saves."""
    return sum(p.numel() * p.element_size() for p in module.parameters()) - packed_saves


def native_kernels() -> Kernels:
    """Return the kernels of our own."""
    try:
        return Kernels()
    except BuildError as error:
        raise UnsupportedError(f"--cpu-kernels native: {error}") from error


def measure_peak(args: argparse.Namespace) -> dict[str, Any]:
    """Compare the peak, prompts and rounds included, with weights and cache."""
    kernels = native_kernels() if args.cpu_kernels == "native" else None
    small = random_model(SMALL, as_bf16=True)
    arrange_linears(small.module, use_native=kernels is not None)
    warm = make_engine(small, num_speculative_tokens=2, draft_loops=1)
    run_rounds(warm, 10, 2)  # code that is read, and what torch allocates, once
    del warm, small
    return_freed_memory()
    reset_peak()
    before = resident()
    adapter = random_model(CONFIG, as_bf16=True)
    report = arrange_linears(adapter.module, use_native=kernels is not None)
    use_kernels(adapter.module, kernels)
    engine = make_engine(
        ForcedAcceptance(adapter, 0.8),
        num_speculative_tokens=4,
        draft_loops=1,
        max_num_seqs=args.batch_size,
        max_model_len=args.max_model_len,
        block_size=16,
        attention=None if kernels is None else NativeBackend(kernels),
    )
    ready = resident()
    loading = resident(peak=True)
    run_rounds(engine, args.peak_rounds, args.batch_size)
    peak = resident(peak=True)
    weights = weight_bytes(adapter.module, report.plain_bytes - report.num_bytes)
    planes = engine.runner.pool.planes
    pool = sum(pages.numel() * pages.element_size() for pair in planes for pages in pair)
    return {
        "weight_bytes": weights,
        "pool_bytes": pool,
        "loading_peak_bytes": loading - before,
        "ready_bytes": ready - before,
        "peak_bytes": peak - before,
        "peak_by_weights_and_pool": round((peak - before) / (weights + pool), 4),
        "linears": report.as_dict(),
    }


def measure_growth(args: argparse.Namespace) -> dict[str, Any]:
    """Run rounds of a small model with each candidate in turn, and watch the memory."""
    engine = make_engine(
        ForcedAcceptance(random_model(SMALL, as_bf16=True), 0.7),
        max_num_seqs=args.batch_size,
        max_model_len=256,
        block_size=16,
    )
    candidates = [Candidate(0, 0), Candidate(2, 1), Candidate(4, 2)]
    held: list[int] = []
    parts = 20
    for part in range(parts + 2):
        engine.policy = StaticPolicy(candidates[part % len(candidates)])
        run_rounds(engine, args.rounds // parts, args.batch_size, 1000 * part)
        gc.collect()
        held.append(resident())
    return {
        "rounds": args.rounds,
        "held_bytes": held[2:],
        "growth_bytes": held[-1] - held[2],
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run both and print the table."""
    torch.set_num_threads(args.threads)
    peak = measure_peak(args)
    growth = measure_growth(args)
    mib = 2**20
    rows = [
        ("weights", f"{peak['weight_bytes'] / mib:.1f} MiB"),
        ("key/value cache", f"{peak['pool_bytes'] / mib:.1f} MiB"),
        ("peak", f"{peak['peak_bytes'] / mib:.1f} MiB"),
        ("peak by weights + cache", f"{peak['peak_by_weights_and_pool']:.3f}"),
        (f"growth over {growth['rounds']} rounds", f"{growth['growth_bytes'] / mib:.2f} MiB"),
    ]
    print(markdown(("memory", "value"), rows))
    return {"machine": machine_facts(torch.device("cpu")), "peak": peak, "growth": growth}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch-size", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--max-model-len", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--peak-rounds", type=int, default=60, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5000, help="default: %(default)s")
    parser.add_argument(
        "--cpu-kernels", choices=("torch", "native"), default="torch", help="default: %(default)s"
    )
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="where to keep the numbers")
    args = parser.parse_args(argv)
    return run_command("benchmarks/memory.py", argv, args.json, lambda: measure(args))


if __name__ == "__main__":
    sys.exit(main())
