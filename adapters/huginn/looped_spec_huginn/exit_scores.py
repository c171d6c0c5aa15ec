"""How ready a token is after a loop, by the criteria of the official code (arXiv 2502.05171, 6.1).

Scores are per token and fp32, and larger means more ready; where a small measure means ready, the
score is the negated measure. The official code compares with "<" where a score compares with ">=",
which differs on equality only.
"""

from __future__ import annotations

import torch
from torch import Tensor


def latent_diff(state: Tensor, previous: Tensor) -> Tensor:
    """Return -|x_t - x_(t-1)| / |x_t| ([B, T]) for states [B, T, E]; computed in fp32."""
    now, before = state.float(), previous.float()
    relative: Tensor = (now - before).norm(dim=-1) / now.norm(dim=-1)
    return -relative


def entropy_diff(log_probs: Tensor, previous: Tensor) -> Tensor:
    """Return -|H_t - H_(t-1)| ([B, T], nats) for log probabilities [B, T, V] fp32."""
    return -(_entropy(log_probs) - _entropy(previous)).abs()


def kl(log_probs: Tensor, previous: Tensor) -> Tensor:
    """Return -KL(previous || now) ([B, T], nats) for log probabilities [B, T, V] fp32."""
    return -(previous.exp() * (previous - log_probs)).sum(dim=-1)


def argmax_stability(log_probs: Tensor, previous: Tensor, count: Tensor) -> Tensor:
    """Return `count` + 1 ([B, T]) where the most likely token is still the same, else 0."""
    same = log_probs.argmax(dim=-1) == previous.argmax(dim=-1)
    return torch.where(same, count + 1.0, 0.0)


def _entropy(log_probs: Tensor) -> Tensor:
    return -(log_probs.exp() * log_probs).sum(dim=-1)
