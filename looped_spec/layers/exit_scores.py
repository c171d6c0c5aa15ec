"""How ready a token is after a loop, by how much the loop still changed (arXiv 2502.05171, 6.1).

Scores are per token and fp32, and larger means more ready; where a small measure means ready, the
score is the negated measure. The authors' code compares with "<" where a score compares with ">=",
which differs on equality only.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from looped_spec.adapter import LoopState
from looped_spec.errors import UnsupportedError, closest

CRITERIA = ("latent-diff", "entropy-diff", "kl", "argmax-stability")


def convergence_score(
    criterion: str,
    state: LoopState,
    previous: LoopState,
    previous_score: Tensor | None,
    log_probs: Callable[[LoopState], Tensor],
) -> Tensor:
    """Score one of `CRITERIA` after a loop from `previous` to `state`: [B, T] fp32.

    The first tensor of a state is what recurs, [B, T, E]. `log_probs` reads a state out as log
    probabilities [B, T, V] fp32, for all rows; `latent-diff` does without it, the others call it
    twice. Before the second loop they have nothing to compare with (`previous_score` is None): the
    score is -inf, and 0 for `argmax-stability`.

    Raises:
        UnsupportedError: the criterion is none of these.
    """
    if criterion not in CRITERIA:
        raise UnsupportedError(
            f"the exit criterion must be one of {', '.join(CRITERIA)}, "
            f"got '{criterion}'{closest(criterion, CRITERIA)}"
        )
    if criterion == "latent-diff":
        return latent_diff(state[0], previous[0])
    if previous_score is None:
        first = 0.0 if criterion == "argmax-stability" else -math.inf
        return torch.full(state[0].shape[:2], first, device=state[0].device)
    before, now = log_probs(previous), log_probs(state)
    if criterion == "argmax-stability":
        return argmax_stability(now, before, previous_score)
    return kl(now, before) if criterion == "kl" else entropy_diff(now, before)


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
