"""Root-mean-square normalisation."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from looped_spec.layers.kernels import TakesKernels, computes_as


class RMSNorm(nn.Module, TakesKernels):
    """RMSNorm computed in fp32, rounded to the activation dtype, then scaled (the order of the
    Llama family)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        # On the CPU also while a model is built on the meta device: they are no weights.
        self._root_of_size = torch.tensor(math.sqrt(size), device="cpu")
        self._root_of_eps = torch.tensor(math.sqrt(size * eps), device="cpu")

    def forward(self, x: Tensor) -> Tensor:  # [..., size] any float dtype
        if self.kernels is not None and self.kernels.serves(x):
            return self.kernels.rms_norm(x, self.weight, self.eps)
        if x.dtype != torch.float32:
            normed = F.rms_norm(x.float(), self.weight.shape, None, self.eps)
            return self.weight * normed.to(x.dtype)
        if x.device.type == "cpu" and not torch.is_grad_enabled():
            return self._few_operations(x)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def added(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual + norm(x), both of the shape [..., size]."""
        kernels = self.kernels
        serves = kernels is not None and kernels.serves(x) and kernels.serves(residual)
        if kernels is not None and serves and computes_as(self, RMSNorm):
            return kernels.add_rms_norm(residual, x, self.weight, self.eps)
        normed: Tensor = self(x)
        return residual + normed

    @property
    def parts(self) -> tuple[Tensor, float]:
        """Weight, without a gradient, and epsilon."""
        return self.weight.detach(), self.eps

    def _few_operations(self, x: Tensor) -> Tensor:
        """Return the same with half as many operations as torch has for it on the CPU, where a
        call costs more than the numbers of a few rows.

        sqrt(mean(x**2) + eps) is hypot(|x|, sqrt(size eps)) / sqrt(size).
        """
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * self.weight).mul_(self._root_of_size / torch.hypot(length, self._root_of_eps))
