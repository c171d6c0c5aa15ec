"""What a model predicts after every loop, computed plainly: whole rows, no cache."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from looped_spec.adapter import LoopState, ModelAdapter
from looped_spec.testing.dense import DenseContext


def states_after_each_loop(
    adapter: ModelAdapter, tokens: Tensor, loops: int
) -> tuple[list[LoopState], DenseContext]:
    """Return the states after 1 to `loops` loops for `tokens` [B, T], and their context."""
    ctx = DenseContext(tokens.shape[0], tokens.shape[1], total_loops=loops)
    state = adapter.prelude(tokens, ctx)
    states = []
    for index in range(loops):
        state = adapter.loop(state, index, ctx)
        states.append(state)
    return states, ctx


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy (nats, fp32) of logits [B, T, V] for targets [B, T]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def token_losses(
    adapter: ModelAdapter, tokens: Tensor, targets: Tensor, loops: int
) -> tuple[Tensor, Tensor]:
    """Return the loss (nats) and the greedy choice of every token after every loop, [D, B, T] each.

    Readouts that attend, attend to what the same depth wrote, as in a run of so many loops.
    """
    states, ctx = states_after_each_loop(adapter, tokens, loops)
    losses, choices = [], []
    for state in states:
        logits = adapter.readout(state, ctx).float()
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        losses.append(loss.view_as(targets))
        choices.append(logits.argmax(-1))
    return torch.stack(losses), torch.stack(choices)
