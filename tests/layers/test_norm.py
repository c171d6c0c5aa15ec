"""RMSNorm against the plain formula in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from looped_spec.layers.norm import RMSNorm

# Some roundings of fp32 numbers of size 10 at most
TOLERANCE = 1e-5
EPS = 1e-6


def norm_of(size: int) -> RMSNorm:
    norm = RMSNorm(size, EPS)
    generator = torch.Generator().manual_seed(size)
    norm.weight.data.copy_(torch.rand(size, generator=generator) + 0.5)
    return norm


def oracle(norm: RMSNorm, x: Tensor) -> Tensor:
    x, weight = x.double(), norm.weight.detach().double()
    return x / (x.square().mean(dim=-1, keepdim=True) + norm.eps).sqrt() * weight


@pytest.mark.parametrize("size", [1, 7, 64, 320, 2048])
@pytest.mark.parametrize("scale", [1e-5, 1e-3, 1.0, 1e4])
def test_both_ways_agree_with_the_formula(size: int, scale: float) -> None:
    norm = norm_of(size)
    x = scale * torch.randn(3, 2, size, generator=torch.Generator().manual_seed(0))
    with_gradients = norm(x)
    with torch.no_grad():
        without = norm(x)
    assert with_gradients.requires_grad and not without.requires_grad
    for out in (with_gradients, without):
        torch.testing.assert_close(out.double(), oracle(norm, x), atol=TOLERANCE, rtol=TOLERANCE)


def test_zeros_stay_zeros_and_what_is_not_finite_shows() -> None:
    norm = norm_of(16)
    x = torch.zeros(3, 16)
    x[1, 3], x[2, 5] = float("inf"), float("nan")
    with torch.no_grad():
        out = norm(x)
    assert torch.equal(out[0], torch.zeros(16))
    assert not out[1].isfinite().all() and not out[2].isfinite().all()


@pytest.mark.parametrize("size", [33, 224, 512])
def test_bits_of_a_row_do_not_depend_on_the_other_rows(size: int) -> None:
    norm = norm_of(size)
    x = torch.randn(24, 5, size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        together = norm(x)
        for row in range(24):
            assert torch.equal(norm(x[row : row + 1]), together[row : row + 1])
            assert torch.equal(norm(x[row : row + 1, :1]), together[row : row + 1, :1])


def test_the_input_is_left_as_it_was() -> None:
    norm, x = norm_of(8), torch.randn(2, 8)
    before = x.clone()
    with torch.no_grad():
        norm(x)
    assert torch.equal(x, before)


def test_a_norm_built_without_weights_works_once_it_has_some() -> None:
    with torch.device("meta"):
        norm = RMSNorm(8, EPS)
    norm.weight = torch.nn.Parameter(torch.ones(8), requires_grad=False)
    x = torch.randn(2, 8)
    with torch.no_grad():
        torch.testing.assert_close(norm(x).double(), oracle(norm, x), atol=TOLERANCE, rtol=0)


def test_half_precision_is_normed_in_fp32_and_rounded_before_the_scale() -> None:
    norm = norm_of(64).bfloat16()
    x = torch.randn(4, 64).bfloat16()
    want = (x.float() / (x.float().square().mean(-1, keepdim=True) + EPS).sqrt()).bfloat16()
    with torch.no_grad():
        torch.testing.assert_close(norm(x), want * norm.weight, atol=0.02, rtol=0.01)
