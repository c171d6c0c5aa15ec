"""What is learned: each readout predicts the next token, the gate whether a loop will help."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from looped_spec.testing.dense import DenseContext
from looped_spec_ouro.adapter import OuroAdapter

# Ouro's second stage (arXiv 2510.25741): go on where one more loop lowers the loss by the margin.
GATE_SLOPE = 50.0
GATE_MARGIN = 0.005

# Weight that the norms after attention and MLP start with. At 1, a token's own embedding is mostly
# gone after four loops. Losses of one batch, step 78, loops 1 to 4: 5.38 5.33 5.35 5.38 when it
# starts at 1, 4.41 4.20 4.12 4.11 at 0.12.
BRANCH_SCALE = 0.12


def initialize(adapter: OuroAdapter, seed: int) -> None:
    """Fill all weights from `seed`; branches start small, and the gate starts undecided."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapter.module.named_parameters():
            if name.endswith("embed_tokens.weight"):
                parameter.normal_(0.0, 0.5, generator=generator)
            elif "early_exit_gate" in name:
                parameter.zero_()
            elif parameter.ndim == 2:
                parameter.normal_(0.0, 0.5 * parameter.shape[1] ** -0.5, generator=generator)
            elif name.endswith("layernorm_2.weight"):
                parameter.fill_(BRANCH_SCALE)


def states_after_each_loop(adapter: OuroAdapter, tokens: Tensor) -> list[Tensor]:
    """Return the normed state after 1..D loops, each [B, T, E], for `tokens` [B, T]."""
    loops = adapter.geometry.default_full_loops
    ctx = DenseContext(tokens.shape[0], tokens.shape[1], total_loops=loops)
    state = adapter.prelude(tokens, ctx)
    states = []
    for index in range(loops):
        state = adapter.loop(state, index, ctx)
        states.append(state[0])
    return states


def losses_per_loop(
    adapter: OuroAdapter, states: Sequence[Tensor], targets: Tensor
) -> list[Tensor]:
    """Return the mean cross entropy (nats, fp32) of the readout after each loop."""
    head = adapter.module.lm_head
    return [F.cross_entropy(head(s).flatten(0, 1).float(), targets.flatten()) for s in states]


def weighted(losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the sum of the losses, each times its loop's weight."""
    return torch.stack(list(losses)) @ torch.tensor(list(weights))


def token_losses(
    adapter: OuroAdapter, states: Sequence[Tensor], targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss [D, B, T] and the greedy choice [D, B, T] of every token after every loop."""
    losses, choices = [], []
    for state in states:
        logits = adapter.module.lm_head(state).float()
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        losses.append(loss.view_as(targets))
        choices.append(logits.argmax(-1))
    return torch.stack(losses), torch.stack(choices)


def gate_loss(adapter: OuroAdapter, states: Sequence[Tensor], losses: Tensor) -> Tensor:
    """Return the gate's cross entropy: exit after loop t unless loop t + 1 lowers the loss.

    `states` and `losses` ([D, B, T]) are constants here; only the gate receives a gradient.
    """
    gain = losses[:-1] - losses[1:]
    leave = 1.0 - torch.sigmoid(GATE_SLOPE * (gain - GATE_MARGIN))
    gate = adapter.module.model.early_exit_gate
    logits = torch.stack([gate(state.float()).squeeze(-1) for state in states[:-1]])
    return F.binary_cross_entropy_with_logits(logits, leave)
