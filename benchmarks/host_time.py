"""Host time of a round: scheduler, controller, bookkeeping, and the Python of engine and runner.

The model is a stub that computes nothing: a round gives tokens that were made before, of which a
fixed share is accepted; neither it nor attention is prepared for. What is left is what every round
costs beside tensor work. Reported are medians over rounds in which nobody comes or goes, at several
batch sizes, with short and with long contexts in turns; and over rounds of short requests in which
somebody comes, which adds admission, prompts and ends, at the beginning and with ten thousand
requests come and gone before. Times are those of the thread on its processor, so that other
processes disturb them little; the time of the clock stands in the numbers.

With `--live-lengths` it times instead plain rounds of a model of the demo's size that does compute:
whether attention costs what requests are long, or what they might become.
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
from cpu_model import CONFIG, random_model
from demo import PLAIN
from results import markdown, run_command
from torch import Tensor

from looped_spec import AdaptiveSpecConfig, SamplingParams
from looped_spec.adapter import KVPlane
from looped_spec.control.controller import AdaptiveController
from looped_spec.control.plan import Candidate
from looped_spec.control.static import StaticPolicy
from looped_spec.layers.native import BuildError
from looped_spec.offline.machine import machine_facts
from looped_spec.runtime import round_program
from looped_spec.runtime import runner as runner_module
from looped_spec.runtime.attention import AttentionBackend, SdpaBackend
from looped_spec.runtime.attention.native import NativeBackend
from looped_spec.runtime.engine import Engine
from looped_spec.runtime.policy import SpeculationPolicy
from looped_spec.runtime.round import RoundOutput
from looped_spec.testing.engine import make_engine
from looped_spec.testing.toy import ToyAdapter, make_toy

LOOPS = 4
DRAFTED = (2, 1)
TARGETS_US = {1: 150.0, 32: 600.0, 256: 2000.0}
"""Most microseconds of a round, by batch size."""
TURNS = 3
BLOCK_SIZE = 16
DEMO: dict[str, Any] = {
    **CONFIG,
    "vocab_size": 1024,
    "hidden_size": 320,
    "intermediate_size": 896,
    "num_hidden_layers": 1,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
}
LIVE_TURNS, LIVE_ROUNDS = 6, 3
LIVE_ROOM = 4 + (LIVE_TURNS + 1) * LIVE_ROUNDS
"""Positions that a request grows by while it is timed, at most."""


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
        block_size=BLOCK_SIZE,
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


def time_steps(engine: Engine, count: int, newcomers: list[int] | None = None) -> Times:
    """Time `count` steps; `newcomers` gets how many requests had their first token in each."""
    times = Times([], [])
    came: list[Any] = []
    for _ in range(count):
        came.clear()
        clock, thread = time.perf_counter(), time.thread_time()
        engine.step(None if newcomers is None else came.extend)
        times.thread.append(1e6 * (time.thread_time() - thread))
        times.clock.append(1e6 * (time.perf_counter() - clock))
        if newcomers is not None:
            newcomers.append(len(came))
    return times


def steady(policy: SpeculationPolicy, batch_size: int, context: int, rounds: int) -> Times:
    """Time rounds of requests that neither come nor go, after a warm-up. Their prompts differ in
    length by less than a block, so that about as many take a new block in every round."""
    room = 9 * (rounds + 60) + BLOCK_SIZE
    engine = stub_engine(policy, batch_size, context + room)
    params = SamplingParams(max_tokens=room - BLOCK_SIZE, ignore_eos=True, temperature=0.7, seed=1)
    for number in range(batch_size):
        engine.add_request([1] * (context + number % BLOCK_SIZE), params)
    time_steps(engine, 50)
    assert len(engine.scheduler.running) == batch_size
    return time_steps(engine, rounds)


@dataclass(frozen=True)
class Churn:
    """Microseconds of rounds in which somebody came, at the beginning and at the end of a run, and
    how many came in one."""

    first_us: float
    last_us: float
    newcomers: float


def churn(policy: SpeculationPolicy, batch_size: int, num_requests: int) -> Churn:
    """Time rounds of short requests that come and go, with a full batch throughout: the second
    tenth of the run and the last but one."""
    engine = stub_engine(policy, batch_size, 64)
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
    waiting = itertools.repeat([1] * 8, num_requests)
    times: list[float] = []
    newcomers: list[int] = []
    while True:
        while len(engine.scheduler.waiting) < batch_size and (prompt := next(waiting, None)):
            engine.add_request(prompt, params)
        if not engine.has_work:
            break
        times += time_steps(engine, 1, newcomers).thread
    told = [(us, came) for us, came in zip(times, newcomers, strict=True) if came]
    tenth = max(1, len(told) // 10)
    first, last = (
        statistics.median([us for us, _ in told[part]])
        for part in (slice(tenth, 2 * tenth), slice(-2 * tenth, -tenth))
    )
    return Churn(round(first, 1), round(last, 1), round(statistics.mean(c for _, c in told), 1))


def in_turns(
    make: Callable[[], SpeculationPolicy], batch_size: int, contexts: Sequence[int], rounds: int
) -> list[Times]:
    """Time rounds with each of `contexts`, by turns, so that a slow spell of the machine meets all
    of them."""
    found = [Times([], []) for _ in contexts]
    for _ in range(TURNS):
        for times, context in zip(found, contexts, strict=True):
            part = steady(make(), batch_size, context, -(-rounds // TURNS))
            times.thread.extend(part.thread)
            times.clock.extend(part.clock)
    return found


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
            short, long = map(
                spread, in_turns(make, batch_size, (args.short, args.long), args.rounds)
            )
            coming = churn(make(), batch_size, args.requests)
            target = TARGETS_US.get(batch_size)
            slope = 1000 * (long["us"] - short["us"]) / max(1, args.long - args.short)
            results.append(
                {
                    "batch_size": batch_size,
                    "policy": name,
                    "short": short,
                    "long": long,
                    "us_per_1000_tokens": round(slope, 2),
                    "first_requests_us": coming.first_us,
                    "last_requests_us": coming.last_us,
                    "newcomers_per_round": coming.newcomers,
                    "target_us": target,
                }
            )
            all_us = short["us"], long["us"], coming.first_us, coming.last_us
            verdict = "-" if target is None else "yes" if max(all_us) <= target else "no"
            came = f"{coming.newcomers:.0f}"
            cells = (*map(round, all_us[:2]), f"{slope:.1f}", came, *map(round, all_us[2:]))
            row = (*cells, target or "-", verdict)
            rows.append((f"B={batch_size}, {name}", *row))
    heads = (
        "us per round",
        f"context {args.short}",
        f"context {args.long}",
        "per 1000 tokens",
        "come per round",
        "first requests",
        f"after {args.requests}",
        "target",
        "met",
    )
    print(markdown(heads, rows))
    return {"machine": machine_facts(torch.device("cpu")), "results": results}


def measure_live(args: argparse.Namespace) -> dict[str, Any]:
    """Time plain rounds of the demo's size at several lengths, each with tables of several
    widths, by turns, and print the table."""
    torch.set_num_threads(1)
    adapter = random_model(DEMO, as_bf16=False)
    backends: list[AttentionBackend] = [SdpaBackend()]
    try:
        backends.append(NativeBackend())
    except BuildError as error:
        print(f"native is left out: {error}", file=sys.stderr)
    heads = ("us per round", *(f"live {live}" for live in args.live_lengths))
    rows, results = [], []
    for backend, batch_size in itertools.product(backends, args.live_batch_sizes):
        engines = {}
        for live, most in itertools.product(args.live_lengths, args.max_model_lens):
            engine = make_engine(
                adapter,
                max_num_seqs=batch_size,
                max_num_batched_tokens=1 << 16,
                block_size=BLOCK_SIZE,
                max_model_len=most,
                num_blocks=max(most, batch_size * (live + BLOCK_SIZE)) // BLOCK_SIZE,
                attention=backend,
            )
            params = SamplingParams(max_tokens=LIVE_ROOM, ignore_eos=True, temperature=0.0)
            for first in range(1, batch_size + 1):
                engine.add_request([first] * (live - LIVE_ROOM), params)
            time_steps(engine, LIVE_ROUNDS)
            assert len(engine.scheduler.running) == batch_size
            engines[live, most] = engine, Times([], [])
        for _ in range(LIVE_TURNS):
            for engine, times in engines.values():
                part = time_steps(engine, LIVE_ROUNDS)
                times.thread.extend(part.thread)
                times.clock.extend(part.clock)
        found = {case: spread(times) for case, (_, times) in engines.items()}
        for most in args.max_model_lens:
            cells = [round(found[live, most]["us"]) for live in args.live_lengths]
            rows.append((f"{backend.name}, B={batch_size}, max_model_len {most}", *cells))
        results += [
            {
                "attention": backend.name,
                "batch_size": batch_size,
                "live_length": live,
                "max_model_len": most,
                **times,
            }
            for (live, most), times in found.items()
        ]
    print(markdown(heads, rows))
    facts = machine_facts(torch.device("cpu"))
    return {"machine": facts, "config": DEMO, "results": results}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 32, 256], metavar="B")
    parser.add_argument("--rounds", type=int, default=300, help="timed each: %(default)s")
    parser.add_argument("--short", type=int, default=32, help="prompt tokens: %(default)s")
    parser.add_argument("--long", type=int, default=4096, help="prompt tokens: %(default)s")
    parser.add_argument("--requests", type=int, default=10_000, help="default: %(default)s")
    parser.add_argument(
        "--live-lengths",
        type=int,
        nargs="+",
        metavar="N",
        help="time rounds of a model that computes, with requests this long, instead",
    )
    parser.add_argument("--max-model-lens", type=int, nargs="+", default=[1024, 4096], metavar="N")
    parser.add_argument("--live-batch-sizes", type=int, nargs="+", default=[1, 8], metavar="B")
    parser.add_argument("--json", type=Path, help="where to keep the numbers")
    args = parser.parse_args(argv)
    if args.live_lengths:
        if min(args.live_lengths) <= LIVE_ROOM or max(args.live_lengths) > min(args.max_model_lens):
            parser.error(f"live lengths must be above {LIVE_ROOM}, and at most any max-model-lens")
        return run_command("benchmarks/host_time.py", argv, args.json, lambda: measure_live(args))
    with (
        mock.patch.object(round_program, "speculative_round", StubRound()),
        mock.patch.object(runner_module, "prefill", stub_prefill),
        mock.patch.object(runner_module, "PagedContext", lambda *_: None),
    ):
        return run_command("benchmarks/host_time.py", argv, args.json, lambda: measure(args))


if __name__ == "__main__":
    sys.exit(main())
