"""Token choice on the device: argmax, or Gumbel-max with noise that depends on (seed, position,
token) alone.

With T the temperature and g standard Gumbel noise, argmax(logits / T + g) is a sample of
softmax(logits / T) (Gumbel 1954; Maddison et al., arXiv 1411.0030). The noise comes from a
counter-based hash, so a draft and the target that meet at the same position use the same g, and a
request's text does not depend on what ran beside it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from looped_spec.layers.hashing import open_uniform, random_bits, row_keys
from looped_spec.sampling_params import SamplingParams

_NUCLEUS_UNITS = 2.0**40
# Noise is computed for so many numbers at a time on the CPU, in its cache, as it goes through
# 64-bit numbers: for a batch with a large vocabulary that would be most of what a round takes.
_NOISE_NUMBERS = 1 << 16

NOT_FINITE = -1
"""Stands for a token of the target that could not be chosen."""


class SamplingMode(enum.Enum):
    """How much work token choice is for a batch: the most that one of its rows needs."""

    GREEDY = 0
    RANDOM = 1
    FILTERED = 2

    @staticmethod
    def of(params: Sequence[SamplingParams]) -> SamplingMode:
        """Return the cheapest mode that serves every one of `params`."""
        random = [p for p in params if p.temperature > 0]
        if any(p.filters for p in random):
            return SamplingMode.FILTERED
        return SamplingMode.RANDOM if random else SamplingMode.GREEDY


@dataclass(frozen=True)
class SamplingTensors:
    """Sampling parameters of B rows: seeds and top_k [B] int64 (0: all), the others [B] fp32."""

    seeds: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


def choose_tokens(
    logits: Tensor,
    positions: Tensor,
    params: SamplingTensors,
    mode: SamplingMode,
    noise: Tensor | None = None,
) -> Tensor:
    """Choose one token a row.

    Args:
        logits: [B, T, V], any float dtype.
        positions: [B, T] int64, the absolute position that the chosen token will have.
        params: of the B requests.
        mode: what the batch needs at most; a row's choice is the same in every mode that suffices
            for it.
        noise: [B, T, V] fp32, `gumbel_noise` of these positions where it is known already.

    Returns:
        [B, T] int64 token ids.
    """
    greedy = logits.argmax(dim=-1)
    if mode is SamplingMode.GREEDY:
        return greedy
    is_greedy = (params.temperature == 0)[:, None]
    temperature = params.temperature[:, None].masked_fill(is_greedy, 1.0)[..., None]
    # Relative to the largest: a tiny temperature then sends the others to -inf, not all to inf.
    scaled = logits.float()
    scaled = (scaled - scaled.gather(-1, greedy[..., None])).div_(temperature)
    if mode is SamplingMode.FILTERED:
        scaled = filter_logits(scaled, params)
    if noise is None:
        noise = gumbel_noise(params.seeds[:, None], positions, logits.shape[-1])
    return torch.where(is_greedy, greedy, scaled.add_(noise).argmax(dim=-1))


def mark_not_finite(tokens: Tensor, logits: Tensor) -> Tensor:
    """Put `NOT_FINITE` for tokens ([B, T] int64) whose logits ([B, T, V]) hold NaN or infinity, or
    nothing else than minus infinity."""
    return tokens.masked_fill(logits.amax(dim=-1).isfinite().logical_not(), NOT_FINITE)


def filter_logits(scaled: Tensor, params: SamplingTensors) -> Tensor:
    """Set logits outside top_k, then top_p (of what top_k left), then min_p to -inf.

    `scaled` is [B, T, V] fp32, already divided by the temperature. Ties at a border stay in, so the
    result does not depend on the order of a sort.
    """
    ordered = scaled.sort(dim=-1, descending=True).values
    vocab = scaled.shape[-1]
    rank = params.top_k.masked_fill(params.top_k <= 0, vocab).clamp(max=vocab) - 1
    border = ordered.gather(-1, rank[:, None, None].expand(*scaled.shape[:2], 1))
    probability = ordered.masked_fill(ordered < border, -torch.inf).softmax(dim=-1)
    # Whole numbers add up to the same sum in any order, and a long tail is not rounded away.
    share = (probability * _NUCLEUS_UNITS).long()
    before = share.cumsum(dim=-1) - share
    top_p = params.top_p[:, None, None]
    inside = (before < (top_p.double() * _NUCLEUS_UNITS).long()) | (top_p >= 1.0)
    # The kept ranks are a prefix; its last value is the border of the nucleus.
    last = (inside.sum(dim=-1, keepdim=True) - 1).clamp(min=0)
    border = torch.maximum(border, ordered.gather(-1, last))
    border = torch.maximum(border, ordered[..., :1] + params.min_p[:, None, None].log())
    return scaled.masked_fill(scaled < border, -torch.inf)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return standard Gumbel noise [..., V] fp32 for `seeds` and `positions` (int64, shapes that
    broadcast)."""
    keys = row_keys(seeds, positions)
    rows = max(1, _NOISE_NUMBERS // vocab_size)
    if keys.device.type != "cpu" or keys.numel() <= rows:
        return _gumbel(keys, vocab_size)
    parts = [_gumbel(part, vocab_size) for part in torch.split(keys.reshape(-1), rows)]
    return torch.cat(parts).view(*keys.shape, vocab_size)


def _gumbel(keys: Tensor, vocab_size: int) -> Tensor:
    # E = -log(1 - u) is exponential; its small values, which win, keep full precision where u is
    # near 0. In place: with a vocabulary in each row these are the largest tensors of a round.
    return open_uniform(random_bits(keys, vocab_size)).neg_().log1p_().neg_().log_().neg_()
