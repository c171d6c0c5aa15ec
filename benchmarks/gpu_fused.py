"""Rounds with the fused kernels of the layers against rounds without them."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from gpu_rounds import PLAIN, Bench, make_runner

from looped_spec.control.plan import Candidate
from looped_spec.errors import UnsupportedError
from looped_spec.layers.native import use_kernels
from looped_spec.options import EngineOptions
from looped_spec.runtime.fused import choose_fused


def compare_fused(bench: Bench, found: dict[str, Any]) -> None:
    """Time captured rounds with the fused kernels of the layers and without, and compare what the
    first chooses."""
    try:
        kernels = choose_fused(EngineOptions(fused="on"), bench.runner.device)
    except UnsupportedError as refused:
        found["refused"] = str(refused)
        return
    found["rows"] = []
    draft = Candidate(bench.plan.draft_tokens[-2], bench.plan.draft_loops[0])
    context = bench.plan.contexts[0]
    cells = list(itertools.product(bench.plan.batch_sizes, (PLAIN, draft)))
    want, plain = _numbers(bench, *cells[0]), []
    for batch_size, candidate in cells:
        bench.capture(batch_size, candidate)
        plain.append(bench.time_round(batch_size, context, candidate))
    use_kernels(bench.model.module, kernels)
    bench.attention.fused = kernels
    try:
        found["first_round_is_equal"] = torch.equal(want, _numbers(bench, *cells[0]))
        for (batch_size, candidate), plain_ms in zip(cells, plain, strict=True):
            runner = make_runner(
                bench.plan,
                bench.model,
                bench.runner.pool,
                bench.attention,
                bench.plan.max_model_len,
                num_rows=batch_size,
            )
            runner.capture([bench.shape(batch_size, candidate)], show_progress=False)
            fused_ms = bench.time_round(batch_size, context, candidate, runner=runner)
            found["rows"].append(
                {
                    "batch_size": batch_size,
                    "num_speculative_tokens": candidate.num_speculative_tokens,
                    "draft_loops": candidate.draft_loops,
                    "plain_ms": round(plain_ms, 4),
                    "fused_ms": round(fused_ms, 4),
                    "plain_by_fused": round(plain_ms / fused_ms, 3),
                }
            )
    finally:
        use_kernels(bench.model.module, None)
        bench.attention.fused = None


@torch.inference_mode()
def _numbers(bench: Bench, batch_size: int, candidate: Candidate) -> torch.Tensor:
    """Return what an eager round gives the host."""
    bench.place(bench.runner, batch_size, bench.plan.contexts[0])
    return bench.runner.program(bench.shape(batch_size, candidate), has_padding=False).clone()
