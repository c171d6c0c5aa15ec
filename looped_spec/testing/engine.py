"""An engine around an adapter in memory, for tests that need no checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from looped_spec.adapter import ModelAdapter
from looped_spec.control.config import AdaptiveSpecConfig
from looped_spec.control.plan import Candidate
from looped_spec.control.static import StaticPolicy
from looped_spec.runtime.attention import AttentionBackend, SdpaBackend
from looped_spec.runtime.early_exit import ExitRule
from looped_spec.runtime.engine import Engine
from looped_spec.runtime.graphs import GraphBackend, padded_sizes, reachable_shapes
from looped_spec.runtime.kv_cache import KVPool, blocks_for
from looped_spec.runtime.request import Request
from looped_spec.runtime.runner import ModelRunner
from looped_spec.runtime.scheduler import Scheduler
from looped_spec.sampling_params import SamplingParams


def make_engine(
    adapter: ModelAdapter,
    *,
    num_speculative_tokens: int = 0,
    draft_loops: int = 0,
    full_loops: int | None = None,
    max_num_seqs: int = 4,
    max_model_len: int | None = None,
    max_num_batched_tokens: int = 512,
    block_size: int = 4,
    num_blocks: int | None = None,
    eos_token_ids: Sequence[int] = (),
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    exit_rule: ExitRule | None = None,
    graph_backend: GraphBackend | None = None,
    async_scheduling: bool = False,
    prefix_caching: bool = False,
    device: str | torch.device = "cpu",
    attention: AttentionBackend | None = None,
) -> Engine:
    """Return an engine with a cache of `num_blocks` (default: enough for all sequences).

    With a `graph_backend` its one candidate is captured, and plain decoding beside it.
    """
    depth = full_loops or adapter.geometry.default_full_loops
    if exit_rule is not None:
        depth = exit_rule.max_loops
    length = max_model_len or adapter.geometry.max_model_len
    if num_blocks is None:
        num_blocks = blocks_for(length, block_size) * max_num_seqs
    where = torch.device(device)
    pool = KVPool(adapter.kv_planes(depth), num_blocks, block_size, dtype, where)
    runner = ModelRunner(
        adapter,
        pool,
        attention or SdpaBackend(),
        full_loops=depth,
        max_num_seqs=max_num_seqs,
        max_model_len=length,
        device=where,
        exit_rule=exit_rule,
        graph_backend=graph_backend,
        graph_sizes=padded_sizes(max_num_seqs),
    )
    candidate = Candidate(num_speculative_tokens, draft_loops).check(depth)
    if graph_backend is not None:
        config = AdaptiveSpecConfig.pinned(candidate, depth, max_num_seqs)
        runner.capture(reachable_shapes(config, runner.graphs.sizes), show_progress=False)
    return Engine(
        runner,
        Scheduler(
            num_blocks,
            block_size,
            max_num_seqs,
            max_num_batched_tokens,
            save_cache=runner.save_cache if exit_rule else None,
            prefix_caching=prefix_caching,
            prefixes_by_seed=not adapter.capabilities.seed_free,
        ),
        StaticPolicy(candidate),
        max_model_len=length,
        eos_token_ids=eos_token_ids,
        seed=seed,
        async_scheduling=async_scheduling,
    )


def run_all(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
) -> list[Request]:
    """Run prompts to their end and return the requests; every block must be free again."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    requests = [engine.add_request(p, one) for p, one in zip(prompts, each, strict=True)]
    while engine.has_work:
        engine.step()
    allocator = engine.scheduler.allocator
    assert allocator.num_free == allocator.num_blocks, "blocks leaked"
    return requests
