"""Rotary position embedding, split-half form (RoFormer, arXiv 2104.09864; pairing of GPT-NeoX and
Llama)."""

from __future__ import annotations

import torch
from torch import Tensor


class RotaryAngles:
    """Angles computed from positions on use.

    Not a module on purpose: casting a model must never round the fp32 frequencies, loading on the
    meta device
    must never lose them, and a table would have to bound the positions of padded rows.
    """

    def __init__(self, head_dim: int, theta: float) -> None:
        self.head_dim = head_dim
        self.theta = theta
        self._inv_freq: dict[torch.device, Tensor] = {}

    def inv_freq(self, device: torch.device) -> Tensor:
        """Return [head_dim / 2] fp32 inverse frequencies theta ** (-2 i / head_dim) on `device`."""
        if device not in self._inv_freq:
            exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
            self._inv_freq[device] = (1.0 / self.theta**exponent).to(device)
        return self._inv_freq[device]

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each [B, T, 1, head_dim]: fp32 angles, then cast to `dtype`."""
        angles = positions[..., None].float() * self.inv_freq(positions.device)
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(-2)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate_half(x: Tensor) -> Tensor:
    """Return (-x2, x1) for the two halves x1, x2 of the last axis."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` ([B, T, heads, head_dim]) by the angles of `RotaryAngles.cos_sin`."""
    return x * cos + rotate_half(x) * sin
