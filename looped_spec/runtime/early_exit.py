"""Decoding without speculation, each token as deep as it needs.

A row leaves as soon as its score reaches the threshold, and later loops run over fewer rows. How
many that are is read back after every loop, so this is not captured.

Later tokens still attend to the deeper planes of a token that left early. The policy is the last
computed one: its keys and values of the last loop it ran stand in for it in the same layer of every
deeper loop. Prompts run at full depth: sharing planes there costs over ten points of accuracy,
while sharing them in decoding costs almost none (arXiv 2510.25741).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from looped_spec.adapter import KVPlane, LoopState, ModelAdapter
from looped_spec.runtime.attention import PagedContext
from looped_spec.runtime.kv_cache import KVPool
from looped_spec.runtime.logprobs import OnTargets
from looped_spec.runtime.sampler import (
    SamplingMode,
    SamplingTensors,
    choose_tokens,
    mark_not_finite,
)


@dataclass(frozen=True)
class ExitRule:
    """When a token needs no more loops: after `min_loops`, once its score reaches `threshold`."""

    criterion: str
    threshold: float
    min_loops: int
    max_loops: int


@dataclass(frozen=True)
class ExitOutput:
    """The token that follows each request's newest, and the loops that it took: [B] int64 each."""

    next_token: Tensor
    loops: Tensor


def exit_round(
    adapter: ModelAdapter,
    ctx: PagedContext,
    pool: KVPool,
    tokens: Tensor,
    sampling: SamplingTensors,
    *,
    rule: ExitRule,
    mode: SamplingMode,
    on_targets: OnTargets | None = None,
) -> ExitOutput:
    """Run one token of B requests, each until it may leave.

    Args:
        adapter: the model; it must declare `rule.criterion`.
        ctx: the context of the requests' next positions, [B, 1].
        pool: the cache that `ctx` writes to.
        tokens: [B] int64, the token of each request that has no keys and values yet.
        sampling: parameters of the B requests.
        rule: when a row leaves.
        mode: what token choice needs at most.
        on_targets: gets the logits and the tokens.
    """
    planes = adapter.kv_planes(rule.max_loops)
    loops = torch.full_like(tokens, rule.max_loops)
    live = torch.arange(len(tokens), device=tokens.device)
    gone: list[tuple[Tensor, LoopState]] = []
    live_ctx, score = ctx, None
    state = adapter.prelude(tokens[:, None], ctx)
    for index in range(rule.max_loops):
        previous, state = state, adapter.loop(state, index, live_ctx)
        if index + 1 == rule.max_loops:
            break
        score = adapter.exit_score(rule.criterion, state, previous, score, index, live_ctx)
        if index + 1 < rule.min_loops:
            continue
        leaves = score[:, 0] >= rule.threshold
        left = leaves.nonzero()[:, 0]
        if not len(left):
            continue
        stay = leaves.logical_not().nonzero()[:, 0]
        gone.append((live[left], tuple(part[left] for part in state)))
        loops[live[left]] = index + 1
        _fill_deeper_planes(pool, planes, index, live_ctx.slots[left, 0])
        live, state = live[stay], tuple(part[stay] for part in state)
        if not len(stay):
            break
        score, live_ctx = score[stay], live_ctx.select(stay)
    gone.append((live, state))
    order = torch.cat([rows for rows, _ in gone]).argsort()
    parts = zip(*(states for _, states in gone), strict=True)
    final = tuple(torch.cat(part)[order] for part in parts)
    logits = adapter.readout(final, ctx)
    chosen = choose_tokens(logits, ctx.positions + 1, sampling, mode)
    chosen = mark_not_finite(chosen, logits)
    if on_targets is not None:
        on_targets(logits, chosen)
    return ExitOutput(chosen[:, 0], loops)


def _fill_deeper_planes(
    pool: KVPool, planes: tuple[KVPlane, ...], index: int, slots: Tensor
) -> None:
    """Let what loop `index` wrote at `slots` ([N] int64) stand in every deeper loop's planes."""
    source = {plane.layer: number for number, plane in enumerate(planes) if plane.loop == index}
    for number, plane in enumerate(planes):
        if plane.loop is not None and plane.loop > index:
            pool.copy(source[plane.layer], number, slots)
