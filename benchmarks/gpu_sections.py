"""The sections of `gpu.py`: each fills a dictionary as it goes, so that an interruption keeps what
is there."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from gpu_rounds import (
    GREEDY,
    PLAIN,
    Bench,
    Clock,
    Plan,
    decoding,
    make_runner,
    needs_of,
    prompts_of,
)

from looped_spec.control.cost import CostTable
from looped_spec.control.plan import Candidate
from looped_spec.errors import UnsupportedError
from looped_spec.loading import load_adapter
from looped_spec.offline.machine import machine_facts
from looped_spec.runtime.attention import choose_attention
from looped_spec.runtime.graphs import GraphRunner
from looped_spec.runtime.kv_cache import KVPool, blocks_for
from looped_spec.runtime.round_program import RoundShape
from looped_spec.runtime.sampler import SamplingMode
from looped_spec.testing.rounds import everything, make_program, randomize

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden"
FAMILIES = {"ouro": ("ouro-a", 3), "huginn": ("huginn-a", 2), "nanbeige": ("nanbeige-a", 2)}
"""A tiny trained model of each family, and the loops to run it with."""

PROBABILITY = 0.9


def describe(plan: Plan, found: dict[str, Any]) -> None:
    """Say what this runs on, and how fast its memory is."""
    device = torch.device(plan.device, 0) if plan.is_cuda else torch.device("cpu")
    found.update(machine_facts(device))
    for package in ("triton", "flash-attn", "transformers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    found["copy_gb_per_s"] = copy_speed(plan)
    if plan.is_cuda:
        facts = torch.cuda.get_device_properties(0)
        found["total_memory_bytes"] = facts.total_memory
        found["capability"] = f"{facts.major}.{facts.minor}"
        clock, width = (
            getattr(facts, name, None) for name in ("memory_clock_rate", "memory_bus_width")
        )
        if clock and width:  # kHz, two transfers a cycle; bits
            found["peak_gb_per_s"] = round(2 * clock * 1e3 * width / 8 / 1e9, 1)


def copy_speed(plan: Plan) -> float:
    """Return GB/s of reading and writing in a large copy."""
    numbers = 2**29 if plan.is_cuda else 2**20
    source = torch.zeros(numbers, dtype=torch.bfloat16, device=plan.device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(5):
        plan.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        plan.synchronize()
        best = max(best, 2 * source.nbytes / (time.perf_counter() - start) / 1e9)
    return round(best, 1)


@torch.inference_mode()
def check_exact(plan: Plan, found: dict[str, Any]) -> None:
    """Compare captured rounds with eager ones of the same shape, bit for bit."""
    found["cases"] = 0
    found["different"] = []
    for family, (folder, loops) in FAMILIES.items():
        adapter = load_adapter(GOLDEN / folder, device=plan.device, dtype=plan.dtype).adapter
        needs = needs_of(plan, adapter)
        attention = choose_attention("auto", needs)
        for size, k, d in plan.exact:
            candidate = Candidate(k, d)
            eager, twin = (
                make_program(
                    adapter,
                    loops,
                    backend=attention.backend,
                    num_rows=8,
                    block_size=attention.block_size,
                    max_model_len=max(48, attention.block_size),
                    device=plan.device,
                    dtype=plan.dtype,
                )
                for _ in range(2)
            )
            modes = [SamplingMode.FILTERED]
            if (size, k, d) in plan.exact[1:3]:
                modes += [SamplingMode.GREEDY, SamplingMode.RANDOM]
            for mode in modes:
                shape = RoundShape.of(size, candidate, mode)
                runner = GraphRunner(twin, plan.graphs(), sizes=[size])
                runner.capture([shape], show_progress=False)
                for seed in range(3):
                    live = max(1, size - seed)
                    for program in (eager, twin):
                        randomize(program, live, seed)
                    for _ in range(2):
                        want = eager(shape, has_padding=True)
                        got = runner.run(shape._replace(batch_size=live))
                        pairs = zip(everything(eager), everything(twin), strict=True)
                        same = torch.equal(want[:live], got)
                        same = same and all([torch.equal(a, b) for a, b in pairs])
                        found["cases"] += 1
                        if not same:
                            found["different"].append([family, str(shape), seed])
        found[f"attention_{family}"] = attention.backend.description
    found["all_equal"] = not found["different"]


def measure_plain(bench: Bench, machine: dict[str, Any], found: dict[str, Any]) -> None:
    """Time the plain round against what reading weights and cache once would take."""
    found["attention"] = bench.attention.description
    found["weight_bytes"] = bench.weight_bytes()
    found["rows"] = []
    speed = machine.get("peak_gb_per_s") or machine.get("copy_gb_per_s")
    found["bound_gb_per_s"] = speed
    context = bench.plan.contexts[0]
    for batch_size in bench.plan.batch_sizes:
        capture = bench.capture(batch_size, PLAIN)
        repeats = 3 * bench.plan.repeats
        ms = bench.time_round(batch_size, context, PLAIN, repeats=repeats)
        read = bench.weight_bytes() + bench.cache_bytes(batch_size, context)
        bound = read / speed / 1e6 if speed else None
        found["rows"].append(
            {
                "batch_size": batch_size,
                "context": context,
                "ms": round(ms, 4),
                "bound_ms": round(bound, 4) if bound else None,
                "share_of_bound": round(bound / ms, 4) if bound else None,
                "tokens_per_s": round(1000 * batch_size / ms, 1),
                "capture_s": round(capture, 2),
            }
        )


def compare_eager(bench: Bench, found: dict[str, Any]) -> None:
    """Time eager and captured rounds of the same batch."""
    found["rows"] = []
    draft = Candidate(bench.plan.draft_tokens[-2], bench.plan.draft_loops[0])
    for batch_size, candidate in itertools.product(bench.plan.batch_sizes, (PLAIN, draft)):
        bench.capture(batch_size, candidate)
        context = bench.plan.contexts[0]
        graph = bench.time_round(batch_size, context, candidate)
        eager = bench.time_round(batch_size, context, candidate, eager=True, repeats=5)
        found["rows"].append(
            {
                "batch_size": batch_size,
                "num_speculative_tokens": candidate.num_speculative_tokens,
                "draft_loops": candidate.draft_loops,
                "eager_ms": round(eager, 4),
                "graph_ms": round(graph, 4),
                "eager_by_graph": round(eager / graph, 3),
            }
        )


def measure_costs(bench: Bench, clock: Clock, found: dict[str, Any]) -> CostTable | None:
    """Time a round of every (B, L, K, d); return a table of what there was time for."""
    times: dict[tuple[int, int, int, int], float] = {}
    found["cells"], found["skipped"] = [], []
    found["capture_s"] = 0.0
    for candidate, batch_size in itertools.product(
        bench.plan.candidates, reversed(bench.plan.batch_sizes)
    ):
        k, d = candidate.num_speculative_tokens, candidate.draft_loops
        if clock.left < 3:
            found["skipped"].append([batch_size, k, d])
            continue
        found["capture_s"] += bench.capture(batch_size, candidate)
        if not bench.runner.graphs.covers(bench.shape(batch_size, candidate)):
            found["skipped"].append([batch_size, k, d])
            continue
        for context in bench.plan.contexts:
            ms = bench.time_round(batch_size, context, candidate)
            times[batch_size, context, k, d] = ms
            found["cells"].append([batch_size, context, k, d, round(ms, 5)])
    found["capture_s"] = round(found["capture_s"], 2)
    return CostTable.of(times) if times else None


def measure_width(bench: Bench, found: dict[str, Any]) -> None:
    """Time the same rows over block tables for much longer texts: cost is to follow the texts."""
    plan = bench.plan
    context = plan.contexts[0]
    batch_size = plan.batch_sizes[-2]
    wide = make_runner(plan, bench.model, bench.runner.pool, bench.attention, plan.wide_model_len)
    wide.capture([bench.shape(batch_size, PLAIN)], show_progress=False)
    narrow_ms = bench.time_round(batch_size, context, PLAIN)
    wide_ms = bench.time_round(batch_size, context, PLAIN, runner=wide)
    found.update(
        batch_size=batch_size,
        context=context,
        narrow_model_len=plan.max_model_len,
        narrow_ms=round(narrow_ms, 4),
        wide_model_len=plan.wide_model_len,
        wide_ms=round(wide_ms, 4),
        ratio=round(wide_ms / narrow_ms, 4),
    )


def measure_forced(bench: Bench, cost: CostTable, found: dict[str, Any]) -> None:
    """Time whole engine steps with drafts that are right with a probability, against the speed-up
    that round times and accepted drafts predict."""
    plan = bench.plan
    bench.model.set_probability(PROBABILITY)
    found["probability"], found["rows"] = PROBABILITY, []
    wanted = [Candidate(k, plan.draft_loops[0]) for k in plan.draft_tokens[-3:]]
    context = plan.contexts[0]
    for batch_size in plan.batch_sizes:
        known = [c for c in wanted if bench.runner.graphs.covers(bench.shape(batch_size, c))]
        for is_async in (False, True):
            plain = _rate(bench, PLAIN, batch_size, is_async)
            for candidate in known:
                rate = _rate(bench, candidate, batch_size, is_async)
                base, drafted = (cost.ms(batch_size, context, c) for c in (PLAIN, candidate))
                predicted = None
                if base and drafted:
                    predicted = rate["tokens_per_request_round"] * base / drafted
                speedup = rate["tokens_per_s"] / plain["tokens_per_s"]
                found["rows"].append(
                    {
                        "batch_size": batch_size,
                        "num_speculative_tokens": candidate.num_speculative_tokens,
                        "draft_loops": candidate.draft_loops,
                        "async_scheduling": is_async,
                        "plain": plain,
                        "drafting": rate,
                        "speedup": round(speedup, 4),
                        "predicted": round(predicted, 4) if predicted else None,
                        "of_predicted": round(speedup / predicted, 4) if predicted else None,
                    }
                )


def _rate(bench: Bench, candidate: Candidate, batch_size: int, is_async: bool) -> dict[str, float]:
    """Return tokens per second of steps in which nobody comes or goes; the median of 3 runs."""
    plan = bench.plan
    engine = bench.engine(candidate, async_scheduling=is_async)
    prompts = prompts_of(batch_size, plan.contexts[0], bench.model.geometry.vocab_size)
    rates, per_round = [], []
    for _ in range(3):
        room = plan.max_model_len - plan.contexts[0]
        with decoding(engine, prompts, room) as requests:
            before = sum(request.num_tokens for request in requests)
            start = time.perf_counter()
            for _ in range(plan.rounds):
                engine.step()
            seconds = time.perf_counter() - start
            tokens = sum(request.num_tokens for request in requests) - before
        rates.append(tokens / seconds)
        per_round.append(tokens / plan.rounds / batch_size)
    return {
        "tokens_per_s": round(statistics.median(rates), 2),
        "tokens_per_request_round": round(statistics.median(per_round), 4),
        "spread": round((max(rates) - min(rates)) / statistics.median(rates), 4),
    }


def compare_attention(bench: Bench, found: dict[str, Any]) -> None:
    """Time rounds over every attention backend that can serve them here."""
    plan = bench.plan
    batch_size, context = plan.batch_sizes[-2], plan.contexts[-1]
    draft = Candidate(plan.draft_tokens[-2], plan.draft_loops[0])
    found["batch_size"], found["context"] = batch_size, context
    found["backends"] = {}
    for name in ("flash_attn", "triton", "varlen", "sdpa"):
        try:
            choice = choose_attention(name, needs_of(plan, bench.model))
        except UnsupportedError as refused:
            found["backends"][name] = {"refused": str(refused)}
            continue
        num_blocks = batch_size * blocks_for(plan.max_model_len, choice.block_size)
        planes = bench.model.kv_planes(bench.full_loops)
        device = bench.runner.device
        pool = KVPool(planes, num_blocks, choice.block_size, plan.dtype, device)
        runner = make_runner(
            plan, bench.model, pool, choice.backend, plan.max_model_len, num_rows=batch_size
        )
        shapes = {c: bench.shape(batch_size, c) for c in (PLAIN, draft)}
        runner.capture(shapes.values(), show_progress=False)
        found["backends"][name] = {
            "description": choice.backend.description,
            "block_size": choice.block_size,
            "plain_ms": round(bench.time_round(batch_size, context, PLAIN, runner=runner), 4),
            "drafting_ms": round(bench.time_round(batch_size, context, draft, runner=runner), 4),
        }


def measure_divergence(bench: Bench, found: dict[str, Any]) -> None:
    """Count texts that equal plain decoding alone, in other batch shapes, where attention may read
    a context in parts and where it may not. Weights are random, so near ties are common."""
    plan = bench.plan
    batch_size = plan.batch_sizes[-2]
    draft = Candidate(plan.draft_tokens[-2], plan.draft_loops[-1])
    prompts = prompts_of(batch_size, plan.contexts[0], bench.model.geometry.vocab_size)
    count = min(32, plan.max_model_len - plan.contexts[0] - 1)
    found["texts"], found["tokens"], found["rows"] = batch_size, count, []
    block_size = bench.runner.pool.block_size
    for num_splits in (0, 1):
        needs = needs_of(plan, bench.model, block_size=block_size, num_splits=num_splits)
        attention = choose_attention("auto", needs).backend
        runner = make_runner(
            plan,
            bench.plain_adapter,
            bench.runner.pool,
            attention,
            plan.max_model_len,
            num_rows=batch_size,
        )
        rest = Bench(
            plan, bench.model, attention, runner, bench.num_blocks, 0.0, bench.plain_adapter
        )
        settings = [(1, PLAIN), (batch_size, PLAIN), (batch_size, draft)]
        texts = []
        for size, candidate in settings:
            runner.capture([RoundShape.of(size, candidate, GREEDY)], show_progress=False)
            texts.append(_texts(rest, prompts, size, candidate, count))
        for (size, candidate), text in zip(settings[1:], texts[1:], strict=True):
            pairs = list(zip(texts[0], text, strict=True))
            first = [next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
                     for a, b in pairs if a != b]  # fmt: skip
            found["rows"].append(
                {
                    "num_splits": num_splits,
                    "batch_size": size,
                    "num_speculative_tokens": candidate.num_speculative_tokens,
                    "draft_loops": candidate.draft_loops,
                    "equal": sum(a == b for a, b in pairs),
                    "first_differences": sorted(first),
                }
            )


def _texts(
    bench: Bench, prompts: list[list[int]], size: int, candidate: Candidate, count: int
) -> list[list[int]]:
    texts = []
    for first in range(0, len(prompts), size):
        engine = bench.engine(candidate, async_scheduling=False)
        with decoding(engine, prompts[first : first + size], count) as requests:
            while engine.has_work:
                engine.step()
        texts += [list(request.output_token_ids) for request in requests]
    return texts


def note_memory(bench: Bench, found: dict[str, Any]) -> None:
    """Say what weights, cache and graphs take."""
    module, pool = bench.model.module, bench.runner.pool
    found["weight_bytes"] = sum(p.numel() * p.element_size() for p in module.parameters())
    found["cache_bytes"] = sum(pages.nbytes for pair in pool.planes for pages in pair)
    found["graphs"] = bench.runner.graphs.stats.as_dict()
    if bench.plan.is_cuda:
        found["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        found["reserved_bytes"] = torch.cuda.memory_reserved()
        free, total = torch.cuda.mem_get_info()
        found["in_use_bytes"] = total - free
