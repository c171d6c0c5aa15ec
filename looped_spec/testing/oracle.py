"""Slow, plain generation without a cache: what the engine's output is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from looped_spec.adapter import ModelAdapter
from looped_spec.runtime.sampler import SamplingMode, SamplingTensors, choose_tokens
from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.dense import DenseContext


@torch.no_grad()
def dense_logits(
    adapter: ModelAdapter, tokens: Sequence[int], loops: int, *, seed: int = 0, draft: bool = False
) -> torch.Tensor:
    """Return logits [T, V] of a whole sequence, each token computed with `loops` loops; those that
    drafts are taken from if `draft`."""
    ctx = DenseContext(1, len(tokens), loops, torch.tensor([seed]))
    state = adapter.prelude(torch.tensor([list(tokens)]), ctx)
    for index in range(loops):
        state = adapter.loop(state, index, ctx)
    return (adapter.draft_readout if draft else adapter.readout)(state, ctx)[0]


def dense_generate(
    adapter: ModelAdapter,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    full_loops: int,
    params: SamplingParams | None = None,
    seed: int = 0,
    draft: bool = False,
) -> list[int]:
    """Return `num_tokens` new tokens, the whole sequence computed anew for each; greedy by
    default.

    With `draft` they are what drafts of depth `full_loops` would be.
    """
    params = params or SamplingParams(temperature=0.0)
    sampling = SamplingTensors(
        torch.tensor([seed]),
        torch.tensor([float(params.temperature)]),
        torch.tensor([max(params.top_k, 0)]),
        torch.tensor([float(params.top_p)]),
        torch.tensor([float(params.min_p)]),
    )
    tokens = list(prompt)
    for _ in range(num_tokens):
        logits = dense_logits(adapter, tokens, full_loops, seed=seed, draft=draft)[None, -1:]
        where = torch.tensor([[len(tokens)]])
        tokens.append(int(choose_tokens(logits, where, sampling, SamplingMode.of([params]))))
    return tokens[len(prompt) :]
