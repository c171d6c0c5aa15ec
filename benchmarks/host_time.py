"""Host time of a round: scheduler, controller, bookkeeping, and the Python of engine and runner.

The model is a stub that computes nothing: a round gives tokens that were made before, of which a
fixed share is accepted. What is left is what every round costs beside tensor work. Reported are
medians over rounds in which nobody comes or goes, at several batch sizes, with short and with long
contexts, and with ten thousand requests come and gone before. Times are those of the thread on its
processor, so that other processes disturb them little; the time of the clock stands in the numbers.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from demo import PLAIN
from results import markdown, run_command
from torch import Tensor

from looped_spec import AdaptiveSpecConfig, SamplingParams
from looped_spec.adapter import KVPlane
from looped_spec.control.controller import AdaptiveController
from looped_spec.control.plan import Candidate
from looped_spec.control.static import StaticPolicy
from looped_spec.offline.machine import machine_facts
from looped_spec.runtime import round_program
from looped_spec.runtime import runner as runner_module
from looped_spec.runtime.engine import Engine
from looped_spec.runtime.policy import SpeculationPolicy
from looped_spec.runtime.round import RoundOutput
from looped_spec.testing.engine import make_engine
from looped_spec.testing.toy import ToyAdapter, make_toy

LOOPS = 4
DRAFTED = (2, 1)
TARGETS_US = {1: 150.0, 32: 600.0, 256: 2000.0}
"""Most microseconds of a round, by batch size."""


class Stub(ToyAdapter):
    """A model with one small plane, of which no stage is ever called."""

    def kv_planes(self, full_loops: int) -> tuple[KVPlane, ...]:
        """Declare as little as there can be."""
        return (KVPlane("prelude", 1, 1),)


class StubRound:
    """Stands for `speculative_round`: tokens and counts that were made once per shape."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(
        self,
        adapter: Any,
        context: Any,
        tokens: Tensor,
        positions: Tensor,
        sampling: Any,
        *,
        num_speculative_tokens: int,
        shadow_depths: Sequence[int] = (),
        **_: Any,
    ) -> RoundOutput:
        """Return a round in which two of three drafts are accepted, whatever is asked for."""
        shape = len(tokens), num_speculative_tokens
        if shape not in self._made:
            rows = torch.arange(1, shape[1] + 2).expand(shape[0], -1).contiguous()
            accepted = torch.arange(shape[0]) % 3 * shape[1] // 2
            accepted = accepted.clamp(max=shape[1])
            self._made[shape] = rows, accepted, rows.gather(1, accepted[:, None])[:, 0]
        rows, accepted, newest = self._made[shape]
        shadow = accepted[:, None].expand(-1, len(shadow_depths))
        return RoundOutput(rows, accepted, newest, positions + accepted + 1, shadow)


def stub_prefill(*_: Any, next_positions: Tensor | None = None, **__: Any) -> Tensor:
    """Stand for `prefill`: the next token of every prompt is 1."""
    return torch.ones(len(_[3]), dtype=torch.int64)


def stub_engine(policy: SpeculationPolicy, batch_size: int, max_model_len: int) -> Engine:
    """Return an engine around the stub."""
    adapter = make_toy(vocab_size=512, max_model_len=max_model_len)
    vars(adapter)["kv_planes"] = Stub.kv_planes.__get__(adapter)
    engine = make_engine(
        adapter,
        max_num_seqs=batch_size,
        max_num_batched_tokens=1 << 16,
        block_size=16,
        max_model_len=max_model_len,
    )
    engine.policy = policy
    return engine


def policies(max_num_seqs: int) -> dict[str, Callable[[], SpeculationPolicy]]:
    """Return what makes each policy under test."""

    def adaptive(policy: str) -> Callable[[], SpeculationPolicy]:
        config = AdaptiveSpecConfig.default(LOOPS, max_num_seqs, policy=policy)
        return lambda: AdaptiveController(config)

    return {
        "static K=0": lambda: StaticPolicy(Candidate(*PLAIN)),
        "static K=2": lambda: StaticPolicy(Candidate(*DRAFTED)),
        "ema": adaptive("ema"),
        "goodput": adaptive("goodput"),
    }


@dataclass(frozen=True)
class Times:
    """Microseconds of steps: of the thread on its processor, and of the clock."""

    thread: list[float]
    clock: list[float]


def time_steps(engine: Engine, count: int) -> Times:
    """Time `count` steps."""
    times = Times([], [])
    for _ in range(count):
        clock, thread = time.perf_counter(), time.thread_time()
        engine.step()
        times.thread.append(1e6 * (time.thread_time() - thread))
        times.clock.append(1e6 * (time.perf_counter() - clock))
    return times


def steady(policy: SpeculationPolicy, batch_size: int, context: int, rounds: int) -> Times:
    """Time rounds of requests that neither come nor go, after a warm-up."""
    room = 9 * (rounds + 60)
    engine = stub_engine(policy, batch_size, context + room)
    params = SamplingParams(max_tokens=room - 1, ignore_eos=True, temperature=0.7, seed=1)
    for _ in range(batch_size):
        engine.add_request([1] * context, params)
    time_steps(engine, 50)
    assert len(engine.scheduler.running) == batch_size
    return time_steps(engine, rounds)


def aged(policy: SpeculationPolicy, batch_size: int, num_requests: int) -> tuple[float, float]:
    """Return the median step in the first and the last tenth of a run of short requests, with a
    full batch throughout."""
    engine = stub_engine(policy, batch_size, 64)
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
    waiting = itertools.repeat([1] * 8, num_requests)
    times: list[float] = []
    while True:
        while len(engine.scheduler.waiting) < batch_size and (prompt := next(waiting, None)):
            engine.add_request(prompt, params)
        if not engine.has_work:
            break
        times += time_steps(engine, 1).thread
    tenth = len(times) // 10
    return statistics.median(times[tenth : 2 * tenth]), statistics.median(
        times[-2 * tenth : -tenth]
    )


def spread(times: Times) -> dict[str, float]:
    """Return medians, and the quartiles of the thread's time."""
    low, middle, high = statistics.quantiles(times.thread, n=4)
    return {
        "us": round(middle, 1),
        "us_low": round(low, 1),
        "us_high": round(high, 1),
        "clock_us": round(statistics.median(times.clock), 1),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all of it and print the table."""
    torch.set_num_threads(1)
    rows, results = [], []
    ways = policies(max(args.batch_sizes))
    for batch_size in args.batch_sizes:
        for name, make in ways.items():
            short, long = (
                spread(steady(make(), batch_size, context, args.rounds))
                for context in (args.short, args.long)
            )
            first, last = aged(make(), batch_size, args.requests)
            target = TARGETS_US.get(batch_size)
            results.append(
                {
                    "batch_size": batch_size,
                    "policy": name,
                    "short": short,
                    "long": long,
                    "first_requests_us": round(first, 1),
                    "last_requests_us": round(last, 1),
                    "target_us": target,
                }
            )
            verdict = "-" if target is None else "yes" if short["us"] <= target else "no"
            cells = (short["us"], long["us"], round(first), round(last), target or "-", verdict)
            rows.append((f"B={batch_size}, {name}", *cells))
    heads = (
        "us per round",
        f"context {args.short}",
        f"context {args.long}",
        "first requests",
        f"after {args.requests}",
        "target",
        "met",
    )
    print(markdown(heads, rows))
    return {"machine": machine_facts(torch.device("cpu")), "results": results}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 32, 256], metavar="B")
    parser.add_argument("--rounds", type=int, default=300, help="timed each: %(default)s")
    parser.add_argument("--short", type=int, default=32, help="prompt tokens: %(default)s")
    parser.add_argument("--long", type=int, default=4096, help="prompt tokens: %(default)s")
    parser.add_argument("--requests", type=int, default=10_000, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="where to keep the numbers")
    args = parser.parse_args(argv)
    with (
        mock.patch.object(round_program, "speculative_round", StubRound()),
        mock.patch.object(runner_module, "prefill", stub_prefill),
    ):
        return run_command("benchmarks/host_time.py", argv, args.json, lambda: measure(args))


if __name__ == "__main__":
    sys.exit(main())
