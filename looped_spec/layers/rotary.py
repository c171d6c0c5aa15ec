"""Rotary position embedding (RoFormer, arXiv 2104.09864).

Two pairings are in use: channel i with i + head_dim / 2 (GPT-NeoX, Llama), and the neighbours
2 i and 2 i + 1 (the paper).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class RotaryAngles:
    """Angles computed from positions on use.

    Not a module on purpose: casting a model must never round the fp32 frequencies, loading on the
    meta device must never lose them, and a table would have to bound the positions of padded rows.

    `scaling` changes the inverse frequencies ([head_dim / 2] fp32) of a model whose context was
    lengthened, see `rope_scaling`.
    """

    def __init__(
        self, head_dim: int, theta: float, scaling: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.head_dim = head_dim
        self.theta = theta
        self.scaling = scaling
        self._inv_freq: dict[torch.device, Tensor] = {}

    def inv_freq(self, device: torch.device) -> Tensor:
        """Return [head_dim / 2] fp32 inverse frequencies on `device`: theta ** (-2 i / head_dim),
        scaled where the model says so."""
        if device not in self._inv_freq:
            exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
            inv_freq = 1.0 / self.theta**exponent
            if self.scaling is not None:
                inv_freq = self.scaling(inv_freq)
            self._inv_freq[device] = inv_freq.to(device)
        return self._inv_freq[device]

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each [B, T, 1, head_dim]: fp32 angles, then cast to `dtype`."""
        angles = self._angles(positions)
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(-2)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def cos_sin_of_pairs(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each [B, T, 1, head_dim / 2] fp32, for `apply_rotary_to_pairs`."""
        angles = self._angles(positions).unsqueeze(-2)
        return angles.cos(), angles.sin()

    def _angles(self, positions: Tensor) -> Tensor:
        return positions[..., None].float() * self.inv_freq(positions.device)


def rotate_half(x: Tensor) -> Tensor:
    """Return (-x2, x1) for the two halves x1, x2 of the last axis."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` ([B, T, heads, head_dim]) by the angles of `RotaryAngles.cos_sin`."""
    return torch.addcmul(x * cos, rotate_half(x), sin)


def apply_rotary_to_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring channels of `x` ([B, T, ..., heads, head_dim]) in fp32, and cast back.

    `cos` and `sin` are those of `RotaryAngles.cos_sin_of_pairs`, with an axis of size 1 for each
    that x has more.
    """
    even, odd = x.float().reshape(*x.shape[:-1], -1, 2).unbind(dim=-1)
    pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return pairs.flatten(-2).to(x.dtype)
