"""Puts an engine together from a loaded model and the options, and reads its counts."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from looped_spec.control.plan import PLAIN
from looped_spec.control.static import StaticPolicy
from looped_spec.loading import LoadedModel
from looped_spec.options import EngineOptions
from looped_spec.runtime.attention import AttentionChoice
from looped_spec.runtime.engine import Engine
from looped_spec.runtime.graphs import choose_graphs
from looped_spec.runtime.kv_cache import KVPool
from looped_spec.runtime.run_plan import RunPlan
from looped_spec.runtime.runner import ModelRunner
from looped_spec.runtime.scheduler import Scheduler
from looped_spec.runtime.sizing import size_cache

logger = logging.getLogger(__name__)


def make_engine(
    opts: EngineOptions,
    loaded: LoadedModel,
    plan: RunPlan,
    attention: AttentionChoice,
    stop_token_ids: Sequence[int],
) -> Engine:
    """Return an engine that decodes plainly, with a cache as large as memory and options allow.

    Raises:
        CapacityError: the memory given holds no sequence of the length asked for.
        UnsupportedError: captured rounds were asked for where there can be none.
    """
    block_size = attention.block_size
    size = size_cache(
        opts, loaded.adapter, plan.full_loops, block_size, loaded.dtype, loaded.device
    )
    logger.info(
        "%s: %d loops, cache of %d tokens in %d blocks (%.0f MiB), %s, stops at tokens %s",
        loaded.name,
        plan.full_loops,
        size.num_blocks * block_size,
        size.num_blocks,
        size.num_bytes / 2**20,
        plan.description,
        list(stop_token_ids),
    )
    backend = attention.backend.for_engine()
    pool = KVPool(
        loaded.adapter.kv_planes(plan.full_loops),
        size.num_blocks,
        block_size,
        loaded.dtype,
        loaded.device,
    )
    runner = ModelRunner(
        loaded.adapter,
        pool,
        backend,
        full_loops=plan.full_loops,
        max_num_seqs=opts.max_num_seqs,
        max_model_len=size.max_model_len,
        device=loaded.device,
        exit_rule=plan.exit_rule,
        graph_backend=choose_graphs(opts, loaded.device, backend, size.max_model_len),
        graph_memory_bytes=opts.graph_memory_bytes,
        graphs_may_fail=opts.graph_backend == "auto",
    )
    scheduler = Scheduler(
        size.num_blocks,
        block_size,
        opts.max_num_seqs,
        opts.max_num_batched_tokens,
        # Computing a prompt again at full depth would undo the exits of the tokens behind it.
        save_cache=runner.save_cache if plan.exit_rule else None,
        prefix_caching=bool(opts.enable_prefix_caching),
        prefixes_by_seed=not loaded.adapter.capabilities.seed_free,
    )
    return Engine(
        runner,
        scheduler,
        StaticPolicy(PLAIN),
        max_model_len=size.max_model_len,
        eos_token_ids=stop_token_ids,
        seed=opts.seed,
        async_scheduling=opts.async_scheduling,
    )


def engine_stats(engine: Engine) -> dict[str, Any]:
    """Return an engine's counts since it was made."""
    metrics, scheduler = engine.metrics, engine.scheduler
    prefixes = scheduler.prefix_cache
    return {
        "num_rounds": metrics.num_rounds,
        "num_loop_rows": metrics.num_loop_rows,
        "loops_per_round": metrics.loops_per_round,
        "num_draft_tokens": metrics.num_draft_tokens,
        "num_accepted_tokens": metrics.num_accepted_tokens,
        "draft_acceptance_rate": metrics.draft_acceptance_rate,
        "acceptance_by_position": metrics.acceptance_by_position,
        "num_preemptions": scheduler.num_preemptions,
        "num_free_blocks": scheduler.allocator.num_free,
        "num_blocks": scheduler.allocator.num_blocks,
        "prefix_cache": dataclasses.asdict(prefixes) if prefixes else None,
        "num_discarded_rounds": engine.num_discarded_rounds,
        "graphs": engine.runner.graphs.stats.as_dict(),
        "num_switches": metrics.num_switches,
        "num_probe_rounds": metrics.num_probe_rounds,
        "rounds_by_candidate": [
            [c.num_speculative_tokens, c.draft_loops, count]
            for c, count in metrics.rounds_by_candidate.items()
        ],
    }
